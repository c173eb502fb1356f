"""What is cut: finding the decoder layers, hollowing them, and the recipe that rebuilds them."""
