"""Changes as the publisher made them → changes as one subscription must see them."""
