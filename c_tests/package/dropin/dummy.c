// A library with the ten entry points of the first release and nothing behind them: what the
// drop-in test links its program with. Each call names itself on stderr and fails, so a run that
// reaches this library instead of the real one cannot pass. Like the first release it is built
// without a soname. The linker knows names alone, so no arguments are declared.
#include <stdio.h>

enum { kInternalError = 3 };  // ncclInternalError

#define REFUSES(function)                         \
    int function(void);                           \
    int function(void) {                          \
        fprintf(stderr, "dummy: %s\n", __func__); \
        return kInternalError;                    \
    }

REFUSES(ncclEpCreateGroup)
REFUSES(ncclEpGroupDestroy)
REFUSES(ncclEpTensorCreate)
REFUSES(ncclEpTensorDestroy)
REFUSES(ncclEpCreateHandle)
REFUSES(ncclEpHandleDestroy)
REFUSES(ncclEpDispatch)
REFUSES(ncclEpCombine)
REFUSES(ncclEpComplete)
REFUSES(ncclEpHandleGetNumRecvTokens)
