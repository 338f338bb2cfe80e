// The smallest user of the later interface: it asks for the version, and sees a refusal come back.
#include <nccl_ep.h>
#include <stdio.h>

int main(void) {
    int version = 0;
    if (ncclEpGetVersion(&version) != ncclSuccess || version != NCCL_EP_VERSION_CODE) return 1;
    const ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    ncclEpGroup_t group = NULL;
    const ncclResult_t result = ncclEpCreateGroup(&group, NULL, &config);
    printf("version %d, refused with %d\n", version, (int)result);
    return result == ncclInvalidArgument && group == NULL ? 0 : 1;
}
