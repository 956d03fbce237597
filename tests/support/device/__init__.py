"""Cases that tests run on the fake accelerator, under every schedule."""
