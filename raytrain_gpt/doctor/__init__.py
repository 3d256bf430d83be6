"""`doctor`: gather facts about a cluster and check them before a run."""
