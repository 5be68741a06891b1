/* cuBLAS and cuBLASLt as far as ONNX Runtime's provider calls them: products are noted, nothing is computed. */
#include "events.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0 };

static int make(void **out) { static char place; *out = &place; return SUCCESS; }
static int product(const char *name) { stub_note("product %s", name); return SUCCESS; }

int cublasCreate_v2(void **out) { return make(out); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return SUCCESS; }
const char *cublasGetStatusName(int status) { return "stub"; }
const char *cublasGetStatusString(int status) { return "the stub libraries know no errors"; }

int cublasSgemm_v2(void) { return product("Sgemm"); }
int cublasDgemm_v2(void) { return product("Dgemm"); }
int cublasGemmEx(void) { return product("GemmEx"); }
int cublasSgemmBatched(void) { return product("SgemmBatched"); }
int cublasGemmBatchedEx(void) { return product("GemmBatchedEx"); }
int cublasSgemmStridedBatched(void) { return product("SgemmStridedBatched"); }
int cublasGemmStridedBatchedEx(void) { return product("GemmStridedBatchedEx"); }

int cublasLtCreate(void **out) { return make(out); }
int cublasLtMatmulDescCreate(void **out) { return make(out); }
int cublasLtMatrixLayoutCreate(void **out) { return make(out); }
int cublasLtMatrixTransformDescCreate(void **out) { return make(out); }
int cublasLtMatmulPreferenceCreate(void **out) { return make(out); }
int cublasLtMatmul(void) { return product("LtMatmul"); }

/* One algorithm (cublasLtMatmulHeuristicResult_t: 64 bytes of algorithm, workspace, status ...). */
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
    int *found)
{
    memset(results, 0, 96);
    *found = 1;
    return SUCCESS;
}
