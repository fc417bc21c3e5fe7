"""What an operator applies and runs: the command line, the in-job part, the demo."""
