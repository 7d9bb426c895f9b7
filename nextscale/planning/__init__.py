"""What a plan costs: MACs and memory, counted before anything runs."""
