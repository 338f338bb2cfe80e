// A profiler for the test: attaches by NVTX's own header, so that the library's numbers are compared with
// NVIDIA's, and writes what it has heard to NVTX_TEST_OUTPUT when the process ends.
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char names[1 << 16];
static const char* domain_name = "none";
static int pushed, popped, wrong;

static nvtxDomainHandle_t create(const char* name) {
    domain_name = name;
    return (nvtxDomainHandle_t)&domain_name;
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
    wrong += domain != (nvtxDomainHandle_t)&domain_name || event->version != NVTX_VERSION ||
             event->size != NVTX_EVENT_ATTRIB_STRUCT_SIZE ||
             event->messageType != NVTX_MESSAGE_TYPE_ASCII || event->category != 0 ||
             event->colorType != NVTX_COLOR_UNKNOWN || event->payloadType != NVTX_PAYLOAD_UNKNOWN;
    const size_t used = strlen(names);
    snprintf(names + used, sizeof(names) - used, "%s\n", event->message.ascii);
    return pushed++ - popped;
}

static int pop(nvtxDomainHandle_t domain) {
    wrong += domain != (nvtxDomainHandle_t)&domain_name;
    return pushed - ++popped;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    static const unsigned sizes[] = {0,
                                     NVTX_CBID_CORE_SIZE,
                                     NVTX_CBID_CUDA_SIZE,
                                     NVTX_CBID_OPENCL_SIZE,
                                     NVTX_CBID_CUDART_SIZE,
                                     NVTX_CBID_CORE2_SIZE,
                                     NVTX_CBID_SYNC_SIZE};
    const NvtxExportTableVersionInfo* version = get_table(NVTX_ETID_VERSIONINFO);
    wrong += version->struct_size < sizeof(*version) || version->version != NVTX_VERSION;
    version->SetInjectionNvtxVersion(NVTX_VERSION);
    const NvtxExportTableCallbacks* callbacks = get_table(NVTX_ETID_CALLBACKS);
    wrong += callbacks->struct_size < sizeof(*callbacks);
    NvtxFunctionTable table = NULL;
    unsigned size = 0;
    for (unsigned module = 1; module < NVTX_CB_MODULE_SIZE; ++module) {
        wrong += !callbacks->GetModuleFunctionTable((NvtxCallbackModule)module, &table, &size) ||
                 size != sizes[module] || table[0] != NULL || table[size] != NULL;
        // Each place takes a function.
        for (unsigned i = 1; i < size; ++i) *table[i] = NULL;
    }
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size);
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}

__attribute__((destructor)) static void report(void) {
    const char* path = getenv("NVTX_TEST_OUTPUT");
    FILE* output = pushed > 0 && path != NULL ? fopen(path, "w") : NULL;
    if (output == NULL) return;
    fprintf(output, "%sdomain %s\nopen %d\nwrong %d\n", names, domain_name, pushed - popped, wrong);
    fclose(output);
}
