/* The level every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64, scalar code elsewhere. */
#define LEVEL_NAME base
#define VECTOR_BYTES 16
#include "pp1q_level.h"
