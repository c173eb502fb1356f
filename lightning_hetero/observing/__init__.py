"""What happened: recorded steps on one clock, their shares, as a trace and as a chart."""
