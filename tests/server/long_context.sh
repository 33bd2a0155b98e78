#!/bin/bash
# 256K tokens of North Mini Code: long_context.c with its shape.
cd "$(dirname "$0")/../.." || exit 2
exec build/tests/north-mini-code/server/long_context
