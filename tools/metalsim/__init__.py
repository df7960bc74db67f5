"""metalsim: runs Metal kernels and metal-cpp host code on Linux, and checks them. Test-only."""
