"""What happened: recorded steps, their metrics and predictions."""
