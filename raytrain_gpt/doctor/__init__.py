"""`doctor`: what is wrong with a cluster, found before a run is paid for: facts are gathered, then judged."""
