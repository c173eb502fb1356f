"""What is cut: decoder layers, their recipes and their weights."""
