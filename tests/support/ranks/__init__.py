"""What each rank does in tests with several processes, and how these are started."""
