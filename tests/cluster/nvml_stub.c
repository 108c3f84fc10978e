/* NVML as far as rl_core.workers.devices and rl_core.cli.run call it, over made-up GPUs of 80 GiB: those that NVIDIA_VISIBLE_DEVICES names (a comma list of
 * UUIDs, as the container runtime and the fakes of the test cluster write it). Built by nvml_stub.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, MOST = 64, LENGTH = 96 };

static char uuids[MOST][LENGTH];
static unsigned count;
static int ready;

static void read_environment(void) {
    const char *text = getenv("NVIDIA_VISIBLE_DEVICES");
    count = 0;
    if (!text || !strcmp(text, "void") || !strcmp(text, "none"))
        return;
    while (*text && count < MOST) {
        size_t length = strcspn(text, ",");
        if (length && length < LENGTH) {
            memcpy(uuids[count], text, length);
            uuids[count++][length] = 0;
        }
        text += length + (text[length] == ',');
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    read_environment();
    if (!count)
        return DRIVER_NOT_LOADED;
    ready = 1;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *found) {
    *found = count;
    return ready ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!ready)
        return UNINITIALIZED;
    if (index >= count)
        return INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (unsigned index = 0; ready && index < count; index++)
        if (!strcmp(uuids[index], uuid))
            return nvmlDeviceGetHandleByIndex_v2(index, device);
    return ready ? NOT_FOUND : UNINITIALIZED;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    snprintf(text, length, "%s", uuids[(uintptr_t)device - 1]);
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    return result == DRIVER_NOT_LOADED ? "Driver Not Loaded" : result == INVALID_ARGUMENT ? "Invalid Argument" : "Not Found";
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    if (!ready)
        return UNINITIALIZED;
    memory[0] = memory[1] = 80ULL << 30; /* total, free, used */
    memory[2] = 0;
    return device ? SUCCESS : INVALID_ARGUMENT;
}
