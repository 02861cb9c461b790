// C interface of the device: one device, one context, and the properties that torch_npu reads at its start.
#include <cstring>

#include "log.h"
#include "memory.h"
#include "settings.h"

using namespace emulator;

static thread_local int current = -1;
static int context = 0;

API Status aclInit(const char*) { return OK; }
API Status aclFinalize() { return OK; }
API const char* aclrtGetSocName() { return settings().soc.c_str(); }

API Status aclrtGetDeviceCount(uint32_t* count) {
    *count = 1;
    return OK;
}

API Status aclrtGetDevice(int32_t* device) {
    if (current < 0) return fail(NO_DEVICE, "no device was set in this thread");
    *device = current;
    return OK;
}

API Status aclrtSetDevice(int32_t device) {
    if (device != 0) return fail(PARAM_INVALID, "device " + std::to_string(device) + " does not exist; there is one, 0");
    current = device;
    return OK;
}

API Status aclrtResetDevice(int32_t) {
    current = -1;
    return OK;
}

API Status aclrtGetCurrentContext(void** out) {
    if (current < 0) return fail(NO_DEVICE, "no device was set in this thread");
    *out = &context;
    return OK;
}

API Status aclrtSetCurrentContext(void*) {
    current = 0;
    return OK;
}

API Status aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (flags != nullptr) *flags = 0;
    *active = 1;
    return OK;
}

API Status aclrtGetMemInfo(int, size_t* free, size_t* total) {
    *total = settings().hbm_bytes;
    *free = *total - device_bytes_used();
    return OK;
}

API Status aclGetDeviceCapability(uint32_t, int, int64_t* value) {
    *value = 24;  // number of AI cores and of vector cores
    return OK;
}

// Attributes by their public numbers: 301 is total memory, 302 the L2 cache. Numbers of cores are 24.
API Status aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
    *value = attribute == 301 ? int64_t(settings().hbm_bytes) : attribute == 302 ? 192 << 20 : 24;
    return OK;
}

API Status aclrtDeviceCanAccessPeer(int32_t* yes, int32_t, int32_t) {
    *yes = 0;
    return OK;
}

API Status aclsysGetCANNVersion(int, char* version) {
    std::strcpy(version, settings().cann.c_str());
    return OK;
}

API Status aclsysGetVersionStr(const char*, char* version) {
    std::strcpy(version, settings().cann.c_str());
    return OK;
}

// Settings without effect in the emulator.
API Status aclrtSetDeviceSatMode(int) { return OK; }
API Status aclrtSetOpExecuteTimeOut(uint32_t) { return OK; }
API Status aclrtSetOpWaitTimeout(uint32_t) { return OK; }
API Status aclrtSetStreamAttribute(void*, int, void*) { return OK; }
API Status aclrtSetStreamFailureMode(void*, uint64_t) { return OK; }
API Status aclrtSetStreamOverflowSwitch(void*, uint32_t) { return OK; }
API Status aclrtCtxSetSysParamOpt(int, int64_t) { return OK; }

// Options that torch_npu reads back, such as ACL_OPT_DETERMINISTIC.
static int64_t options[16];

API Status aclrtSetSysParamOpt(unsigned option, int64_t value) {
    if (option < 16) options[option] = value;
    return OK;
}

API Status aclrtGetSysParamOpt(unsigned option, int64_t* value) {
    *value = option < 16 ? options[option] : 0;
    return OK;
}

API Status aclSetCompileopt(int, const char*) { return OK; }
API size_t aclGetCompileoptSize(int) { return 64; }
API Status aclGetCompileopt(int, char* value, size_t) {
    *value = 0;
    return OK;
}
API Status aclrtPeekAtLastError(int) { return OK; }
API Status aclrtGetLastError(int) { return OK; }
API Status MsprofRegisterCallback(uint32_t, void*) { return OK; }
