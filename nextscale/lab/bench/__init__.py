"""How fast requests are, beside the roofline of the machine."""
