"""The sampler as kernels: one launch draws a draft token of every row, two judge all drafts."""
