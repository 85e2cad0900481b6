"""What `metalctl doctor` looks at. A check is a function that returns a `Check`, or several."""
