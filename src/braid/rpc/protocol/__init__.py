"""State machines of remote calls: references and distributed autograd, without torch or threads."""
