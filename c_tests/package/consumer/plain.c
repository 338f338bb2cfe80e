// The smallest user of an installed library: it links with nothing but nccl_ep, asks for the
// version, and sees a refusal come back as a result and a text. That it links and runs proves that
// the library needs neither CUDA nor NCCL until a group is made.
#include <nccl_ep.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    int version = 0;
    if (ncclEpGetVersion(&version) != ncclSuccess) return 1;
    printf("version %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);

    const ncclResult_t result = ncclEpCreateGroup(NULL, NULL, NULL, NULL, NULL, NULL);
    printf("refused with %d: %s\n", (int)result, ncclEpGetLastError());
    return result == ncclInvalidArgument && strstr(ncclEpGetLastError(), "ncclEpCreateGroup") ? 0 : 1;
}
