"""How fast requests are, beside their roofline."""
