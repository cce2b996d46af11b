"""How the modules of a model are cut into units and placed on devices."""
