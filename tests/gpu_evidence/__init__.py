"""What can be proven of the GPU side on a machine without one."""
