"""How fast it is: measures a model on its devices."""
