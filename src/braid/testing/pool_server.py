"""The last import of the process from which a pool's children are forked.

What the imports have made is taken out of the garbage collector's sight: a collection in a child
then costs a millisecond instead of a hundred, and copies no page that the children share.
"""

import gc

gc.freeze()
