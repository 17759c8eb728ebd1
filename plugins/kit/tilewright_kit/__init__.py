"""The parts from which operation plugins are made. Import the module of the concept: there is one for each."""
