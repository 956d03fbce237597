"""What a training tells of itself: the report, live statistics, and the file of a run."""
