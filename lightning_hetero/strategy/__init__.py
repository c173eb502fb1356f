"""What Lightning calls: the strategy and its hooks."""
