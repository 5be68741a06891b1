/* cuDNN as far as ONNX Runtime's provider calls it: reductions, and plans made through the backend's descriptors.
 *
 * Every graph of operations has one engine, which needs no workspace and is always found fit. Numbers of attributes
 * and types: cudnn_graph.h of cuDNN 9.
 */
#include "events.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, VERSION = 91500 };
enum { HEURISTIC_RESULTS = 202, TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, SIZE_OF_ELEMENT = 8 };

static int make(void **out) { *out = calloc(1, 64); return *out ? SUCCESS : 1; }

size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return "the stub libraries know no errors"; }
void cudnnGetLastErrorString(char *message, size_t size) { if (size) *message = '\0'; }

int cudnnCreate(void **out) { return make(out); }
int cudnnDestroy(void *handle) { free(handle); return SUCCESS; }
int cudnnCreateTensorDescriptor(void **out) { return make(out); }
int cudnnDestroyTensorDescriptor(void *descriptor) { free(descriptor); return SUCCESS; }
int cudnnCreateReduceTensorDescriptor(void **out) { return make(out); }
int cudnnDestroyReduceTensorDescriptor(void *descriptor) { free(descriptor); return SUCCESS; }

int cudnnGetReductionIndicesSize(void *handle, void *reduction, void *a, void *c, size_t *size)
{
    *size = 1024;
    return SUCCESS;
}

int cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *a, void *c, size_t *size)
{
    *size = 1024;
    return SUCCESS;
}

int cudnnReduceTensor(void) { stub_note("cudnn ReduceTensor"); return SUCCESS; }
int cudnnSoftmaxForward(void) { stub_note("cudnn SoftmaxForward"); return SUCCESS; }

int cudnnBackendCreateDescriptor(int kind, void **out) { return make(out); }
int cudnnBackendDestroyDescriptor(void *descriptor) { free(descriptor); return SUCCESS; }
int cudnnBackendExecute(void *handle, void *plan, void *arguments) { stub_note("cudnn plan"); return SUCCESS; }

/* Numbers are zero, lists of numbers are empty, and of descriptors there is one. */
int cudnnBackendGetAttribute(
    void *descriptor, int attribute, int type, int64_t wanted, int64_t *count, void *elements)
{
    int64_t found = type == TYPE_DESCRIPTOR || wanted == 1;
    if (count)
        *count = found;
    if (elements && found && type != TYPE_DESCRIPTOR)
        memset(elements, 0, type == TYPE_INT64 ? SIZE_OF_ELEMENT : 4);
    return SUCCESS;
}
