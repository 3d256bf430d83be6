"""Everything that runs on Ray, writes a run's files or talks to a tracker."""
