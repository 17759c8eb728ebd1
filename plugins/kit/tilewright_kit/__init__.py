"""What every operation plugin of Tilewright is built from. Import the module of the concept: there is one for each."""
