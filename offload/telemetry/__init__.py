"""What a training run reports: the report, live statistics, and the file of a run."""
