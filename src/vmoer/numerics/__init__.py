"""Arithmetic on tensors that knows no model: noise, Gaussians, integrals, and fused kernels for them."""
