/* A CUDA runtime that is none: it keeps account of what is registered, and fails as told. For tests of client/tensors.py. */
#include <stddef.h>

static int devices = 1, fail_register, last_error, registered, calls, last_flags;
static void *last_address, *held[16];
static size_t last_size;

void fake_set(int device_count, int register_error) { devices = device_count; fail_register = register_error; }
int fake_registered(void) { return registered; }
int fake_calls(void) { return calls; }
int fake_flags(void) { return last_flags; }
int fake_last_error(void) { return last_error; }
size_t fake_size(void) { return last_size; }
void *fake_address(void) { return last_address; }

int cudaGetDeviceCount(int *count) {
    *count = devices;
    return last_error = devices > 0 ? 0 : devices < 0 ? 35 : 0;
}
const char *cudaGetErrorName(int code) { return code == 35 ? "cudaErrorInsufficientDriver" : code == 801 ? "cudaErrorNotSupported" : 0; }
int cudaGetLastError(void) { int was = last_error; last_error = 0; return was; }
int cudaHostRegister(void *address, size_t size, unsigned int flags) {
    int at = 0;
    calls++;
    last_address = address; last_size = size; last_flags = (int)flags;
    if (fail_register) return last_error = fail_register;
    for (int i = 0; i < 16; i++) {
        if (held[i] == address) return last_error = 712;
        if (!held[i]) at = i;
    }
    held[at] = address;
    registered++;
    return 0;
}
int cudaHostUnregister(void *address) {
    for (int i = 0; i < 16; i++)
        if (held[i] == address) {
            held[i] = 0;
            registered--;
            return 0;
        }
    return last_error = 713;
}
