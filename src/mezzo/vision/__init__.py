"""The application: networks for images, their data, recipes, training, export and predictions."""
