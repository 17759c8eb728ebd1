"""Resources that a tiled product needs: registers, shared memory, workspace."""
