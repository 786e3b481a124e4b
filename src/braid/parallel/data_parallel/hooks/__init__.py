"""Communication hooks: what ranks send in place of whole gradients."""
