"""AMD GPUs as devices. Importing this touches no driver, and needs no package of AMD's.

``hip-python`` is used from version 10 on: earlier ones hold the interpreter's lock while they wait for the device, and
everybody else in the process with it.
"""
