"""Programs of the ranks in tests with several processes, and the launcher that starts them."""
