#!/bin/sh
# The C++ compiler for SGLang's n-gram corpus: a source file of 0.5.17 and 0.5.18 lacks this include.
exec c++ -include cstddef "$@"
