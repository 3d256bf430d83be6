// An H100 that is not there: CUDA, cuBLAS, cuDNN and NCCL as torch and Triton call them, in one library to
// preload. Kernels do nothing and are recorded; memory is lazily mapped host memory. Here are the functions
// for which "0, success" is a wrong answer; build.sh generates all others. `null_*` is the recorder's interface.
#include <driver_types.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <vector_types.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define ANSWER(name, arguments, ...) \
  EXPORT int name arguments {        \
    __VA_ARGS__;                     \
    return 0;                        \
  }

using Handle = void *;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- recorder: kind, name, bytes and six numbers of every event ----------------------------------------

struct Event {
  const char *kind;
  std::string name;
  size_t bytes;
  std::array<long long, 6> numbers;
};

struct State {
  std::recursive_mutex mutex;
  bool recording = false;
  std::vector<Event> events;
  std::unordered_map<const void *, std::string> kernel_names;
  std::map<uintptr_t, std::pair<size_t, bool>> regions;  // address -> bytes, whether on the device
  std::map<unsigned long long, size_t> segments;         // handle of cuMemCreate -> bytes
  size_t used = 0;
  uintptr_t last_handle = 0x1000;
};

static State &state() {
  static auto *instance = new State;  // never destroyed: libraries call until the process ends
  return *instance;
}

static const size_t TOTAL_BYTES = size_t{81089} << 20;  // what an H100 80GB HBM3 reports
static const size_t USABLE_BYTES = TOTAL_BYTES - (size_t{500} << 20);
static const size_t LARGE = 1 << 20;  // larger device memory is not written: nobody reads it

static void record(const char *kind, const std::string &name, size_t bytes = 0, std::array<long long, 6> numbers = {}) {
  Lock lock(state().mutex);
  if (state().recording) state().events.push_back({kind, name, bytes, numbers});
}

EXPORT void null_record(int on) { state().recording = on; }
EXPORT void null_mark(const char *text) { record("mark", text); }
EXPORT void null_dump(const char *path) {
  Lock lock(state().mutex);
  FILE *file = fopen(path, "w");
  for (const Event &event : state().events) {
    const auto &n = event.numbers;
    fprintf(file, "%s\t%s\t%zu\t%lld,%lld,%lld,%lld,%lld,%lld\n", event.kind, event.name.c_str(), event.bytes, n[0], n[1],
            n[2], n[3], n[4], n[5]);
  }
  fclose(file);
  state().events.clear();
}

static Handle fresh() {
  Lock lock(state().mutex);
  return reinterpret_cast<Handle>(state().last_handle += 64);
}

// ---- device ----------------------------------------------------------------------------------------------

ANSWER(cudaGetDeviceCount, (int *count), *count = 1)
ANSWER(cudaGetDevice, (int *device), *device = 0)
ANSWER(cuDeviceGetCount, (int *count), *count = 1)
ANSWER(cuDeviceGet, (int *device, int), *device = 0)
ANSWER(cudaRuntimeGetVersion, (int *version), *version = 13000)
ANSWER(cudaDriverGetVersion, (int *version), *version = 13000)
ANSWER(cuDriverGetVersion, (int *version), *version = 13000)
ANSWER(cudaDeviceCanAccessPeer, (int *can, int, int), *can = 0)
ANSWER(cudaDeviceGetPCIBusId, (char *text, int size, int), snprintf(text, size, "0000:01:00.0"))
EXPORT const char *cudaGetErrorString(int) { return "an error of the null GPU"; }
EXPORT const char *cudaGetErrorName(int) { return "nullError"; }

EXPORT int cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = i + 1;
  p->totalGlobalMem = TOTAL_BYTES;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->l2CacheSize = 52428800;
  p->memoryBusWidth = 5120;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  p->canMapHostMemory = p->streamPrioritiesSupported = p->canUseHostPointerForRegisteredMem = 1;
  return 0;
}

static int attribute(int number) {
  static const std::map<int, int> values = {
      {1, 1024},   {2, 1024},    {3, 1024},     {4, 64},      {5, 2147483647}, {6, 65535},    {7, 65535},   {8, 49152},
      {9, 65536},  {10, 32},     {12, 65536},   {13, 1980000}, {16, 132},       {31, 1},       {32, 1},      {36, 2619000},
      {37, 5120},  {38, 52428800}, {39, 2048},  {40, 3},       {41, 1},         {75, 9},       {78, 1},      {81, 233472},
      {82, 65536}, {95, 1},      {97, 232448},  {102, 1},      {106, 32},       {111, 1024},   {115, 1},     {120, 1}};
  auto found = values.find(number);
  return found == values.end() ? 0 : found->second;
}
ANSWER(cudaDeviceGetAttribute, (int *value, int number, int), *value = attribute(number))
ANSWER(cuDeviceGetAttribute, (int *value, int number, int), *value = attribute(number))

// ---- memory ----------------------------------------------------------------------------------------------

static void *mapped(size_t bytes) {
  void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

static void *take(size_t bytes, bool on_device) {
  size_t whole = (bytes + 4095) & ~size_t{4095};
  void *at = mapped(whole);
  Lock lock(state().mutex);
  if (at) state().regions[reinterpret_cast<uintptr_t>(at)] = {whole, on_device};
  if (at && on_device) state().used += whole;
  return at;
}

static void drop(void *pointer) {
  Lock lock(state().mutex);
  auto found = state().regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().regions.end()) return;
  auto [bytes, on_device] = found->second;
  munmap(pointer, bytes);
  if (on_device) state().used -= bytes;
  state().regions.erase(found);
}

enum Where { PAGEABLE, PINNED, DEVICE };

static Where where(const void *pointer) {
  Lock lock(state().mutex);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto next = state().regions.upper_bound(at);
  if (next == state().regions.begin()) return PAGEABLE;
  auto [start, region] = *--next;
  if (at >= start + region.first) return PAGEABLE;
  return region.second ? DEVICE : PINNED;
}

static void copy(void *to, const void *from, size_t bytes) {
  if (where(to) == DEVICE && where(from) == DEVICE && bytes > LARGE) return;
  memcpy(to, from, bytes);
}

static void fill(void *to, int value, size_t bytes) {
  if (bytes < LARGE) memset(to, value, bytes);  // new memory is zero already
}

EXPORT int cudaMalloc(void **pointer, size_t bytes) {
  if (state().used + bytes > USABLE_BYTES) return cudaErrorMemoryAllocation;
  *pointer = take(bytes, true);
  return *pointer ? 0 : cudaErrorMemoryAllocation;
}
ANSWER(cudaFree, (void *pointer), if (pointer) { record("wait", "cudaFree"); drop(pointer); })
ANSWER(cudaHostAlloc, (void **pointer, size_t bytes, unsigned), *pointer = take(bytes, false))
ANSWER(cudaFreeHost, (void *pointer), drop(pointer))
ANSWER(cudaMemGetInfo, (size_t *left, size_t *total), *left = USABLE_BYTES - state().used; *total = TOTAL_BYTES)
ANSWER(cudaGetSymbolAddress, (void **pointer, const void *), *pointer = take(1 << 16, true))
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, void *) {
  static const char *names[] = {"host, blocks", "pinned", "device"};
  record("copy", std::string(names[where(from)]) + " to " + names[where(to)], bytes);
  copy(to, from, bytes);
  return 0;
}
ANSWER(cudaMemcpy, (void *to, const void *from, size_t bytes, int), record("wait", "cudaMemcpy", bytes); copy(to, from, bytes))
EXPORT int cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step, size_t width, size_t height, int, void *) {
  record("copy", "rows", width * height);
  for (size_t row = 0; row < height; row++) copy((char *)to + row * to_step, (const char *)from + row * from_step, width);
  return 0;
}
ANSWER(cudaMemsetAsync, (void *to, int value, size_t bytes, void *), record("set", "memset", bytes); fill(to, value, bytes))
ANSWER(cudaMemset, (void *to, int value, size_t bytes), record("set", "memset", bytes); fill(to, value, bytes))
EXPORT int cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  static const cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice};
  memset(attributes, 0, sizeof *attributes);
  attributes->type = types[where(pointer)];
  attributes->devicePointer = const_cast<void *>(pointer);
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void *>(pointer);
  return 0;
}
ANSWER(cuPointerGetAttribute, (void *to, int, unsigned long long pointer), *static_cast<unsigned long long *>(to) = pointer)

// Segments that grow: address ranges, and the memory behind them.
EXPORT int cuMemAddressReserve(unsigned long long *address, size_t bytes, size_t, unsigned long long, unsigned long long) {
  void *at = mapped(bytes);
  if (!at) return 2;
  Lock lock(state().mutex);
  state().regions[reinterpret_cast<uintptr_t>(at)] = {bytes, true};
  *address = reinterpret_cast<uintptr_t>(at);
  return 0;
}
EXPORT int cuMemAddressFree(unsigned long long address, size_t bytes) {
  Lock lock(state().mutex);
  munmap(reinterpret_cast<void *>(address), bytes);
  state().regions.erase(address);
  return 0;
}
EXPORT int cuMemCreate(unsigned long long *handle, size_t bytes, void *, unsigned long long) {
  if (state().used + bytes > USABLE_BYTES) return 2;
  Lock lock(state().mutex);
  state().used += bytes;
  *handle = reinterpret_cast<uintptr_t>(fresh());
  state().segments[*handle] = bytes;
  return 0;
}
EXPORT int cuMemRelease(unsigned long long handle) {
  Lock lock(state().mutex);
  state().used -= state().segments[handle];
  state().segments.erase(handle);
  return 0;
}
ANSWER(cuMemGetAllocationGranularity, (size_t *bytes, void *, int), *bytes = 2 << 20)

// ---- streams and events ------------------------------------------------------------------------------------

ANSWER(cudaStreamCreate, (Handle *stream), *stream = fresh())
ANSWER(cudaStreamCreateWithFlags, (Handle *stream, unsigned), *stream = fresh())
ANSWER(cudaStreamCreateWithPriority, (Handle *stream, unsigned, int), *stream = fresh())
ANSWER(cudaStreamGetPriority, (Handle, int *priority), *priority = 0)
ANSWER(cudaStreamIsCapturing, (Handle, int *status), *status = 0)
ANSWER(cudaStreamGetCaptureInfo, (Handle, int *status, unsigned long long *id, void *, void *, void *, void *), *status = 0; if (id) *id = 0)
ANSWER(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), if (least) *least = 0; if (greatest) *greatest = -5)
ANSWER(cudaEventCreate, (Handle *event), *event = fresh())
ANSWER(cudaEventCreateWithFlags, (Handle *event, unsigned), *event = fresh())
static std::map<Handle, double> &event_times() {  // seconds: the null GPU is done at once
  static auto *instance = new std::map<Handle, double>;
  return *instance;
}
static void note(Handle event) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  Lock lock(state().mutex);
  event_times()[event] = now.tv_sec + now.tv_nsec * 1e-9;
}
ANSWER(cudaEventRecord, (Handle event, Handle), note(event))
ANSWER(cudaEventRecordWithFlags, (Handle event, Handle, unsigned), note(event))
ANSWER(cudaEventElapsedTime, (float *milliseconds, Handle from, Handle to),
       Lock lock(state().mutex); *milliseconds = (event_times()[to] - event_times()[from]) * 1e3)
ANSWER(cudaStreamSynchronize, (Handle), record("wait", "cudaStreamSynchronize"))
ANSWER(cudaDeviceSynchronize, (), record("wait", "cudaDeviceSynchronize"))
ANSWER(cudaEventSynchronize, (Handle), record("wait", "cudaEventSynchronize"))

// ---- kernels -------------------------------------------------------------------------------------------------

static const std::string &name_of(const void *kernel) {
  Lock lock(state().mutex);
  return state().kernel_names[kernel];
}
static void name(const void *kernel, const char *text) {
  Lock lock(state().mutex);
  state().kernel_names[kernel] = text;
}

struct Launch {
  dim3 grid, block;
  size_t shared;
  Handle stream;
};
static thread_local std::vector<Launch> launches;

EXPORT Handle *__cudaRegisterFatBinary(void *) { return static_cast<Handle *>(fresh()); }
ANSWER(__cudaRegisterFunction, (Handle *, const char *host, char *, const char *text, int, void *, void *, void *, void *, int *), name(host, text))
ANSWER(__cudaPushCallConfiguration, (dim3 grid, dim3 block, size_t shared, Handle stream), launches.push_back({grid, block, shared, stream}))
EXPORT int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, Handle *stream) {
  Launch last = launches.back();
  launches.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *stream = last.stream;
  return 0;
}
ANSWER(__cudaGetKernel, (Handle * kernel, const void *host), *kernel = const_cast<void *>(host))
ANSWER(__cudaLaunchKernel, (void *kernel, dim3, dim3, void **, size_t, Handle), record("kernel", name_of(kernel)))
ANSWER(cudaLaunchKernel, (const void *kernel, dim3, dim3, void **, size_t, Handle), record("kernel", name_of(kernel)))
ANSWER(cudaLaunchCooperativeKernel, (const void *kernel, dim3, dim3, void **, size_t, Handle), record("kernel", name_of(kernel)))
ANSWER(cudaLaunchKernelExC, (const cudaLaunchConfig_t *, const void *kernel, void **), record("kernel", name_of(kernel)))
ANSWER(cudaLibraryLoadData, (Handle * library), *library = fresh())
ANSWER(cudaLibraryGetKernel, (Handle * kernel, Handle, const char *text), *kernel = fresh(); name(*kernel, text))
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, const void *, int, size_t), *blocks = 8)
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *blocks, const void *, int, size_t, unsigned), *blocks = 8)
ANSWER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, Handle, int, size_t), *blocks = 8)
ANSWER(cuOccupancyMaxActiveClusters, (int *clusters, Handle, void *), *clusters = 132)
EXPORT int cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return 0;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long, int *status) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (status) *status = *function ? 0 : 1;
  if (!*function) fprintf(stderr, "null GPU: no driver function %s\n", symbol);
  return 0;
}

// Triton's kernels, by the driver
static thread_local Handle context = reinterpret_cast<Handle>(0x500);
ANSWER(cuCtxGetCurrent, (Handle * current), *current = context)
ANSWER(cuCtxSetCurrent, (Handle current), context = current)
ANSWER(cuDevicePrimaryCtxRetain, (Handle * current, int), *current = reinterpret_cast<Handle>(0x500))
ANSWER(cuDevicePrimaryCtxGetState, (int, unsigned *flags, int *active), *flags = 0; *active = 1)
ANSWER(cuModuleLoad, (Handle * module, const char *), *module = fresh())
ANSWER(cuModuleLoadData, (Handle * module, const void *), *module = fresh())
ANSWER(cuModuleLoadDataEx, (Handle * module, const void *), *module = fresh())
ANSWER(cuModuleGetFunction, (Handle * kernel, Handle, const char *text), *kernel = fresh(); name(*kernel, text))
ANSWER(cuFuncGetAttribute, (int *value, int number, Handle), *value = number == 0 ? 1024 : number == 4 ? 32 : 0)
ANSWER(cuLaunchKernel, (Handle kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **), record("triton", name_of(kernel)))
ANSWER(cuLaunchKernelEx, (const void *, Handle kernel, void **, void **), record("triton", name_of(kernel)))

// ---- cuBLAS: matrix products with sizes (m, n, k, batch) and types (inputs, output) ------------------------

static void product(const char *text, long long m, long long n, long long k, long long batch, long long inputs, long long output) {
  record("product", text, 0, {m, n, k, batch, inputs, output});
}
ANSWER(cublasCreate_v2, (Handle * handle), *handle = fresh())
ANSWER(cublasGetMathMode, (Handle, int *mode), *mode = 0)
ANSWER(cublasGetPointerMode_v2, (Handle, int *mode), *mode = 0)
EXPORT size_t cublasLtGetVersion() { return 130101; }
ANSWER(cublasSgemm_v2, (Handle, int, int, int m, int n, int k, ...), product("cublasSgemm", m, n, k, 1, 0, 0))
ANSWER(cublasSgemmStridedBatched, (Handle, int, int, int m, int n, int k, ...), product("cublasSgemmStridedBatched", m, n, k, 1, 0, 0))
ANSWER(cublasGemmEx, (Handle, int, int, int m, int n, int k, const void *, const void *, int type, int, const void *, int, int, const void *, void *, int output, int, int, int),
       product("cublasGemmEx", m, n, k, 1, type, output))
ANSWER(cublasGemmStridedBatchedEx,
       (Handle, int, int, int m, int n, int k, const void *, const void *, int type, int, long long, const void *, int, int, long long, const void *, void *, int output, int, long long, int batch, int, int),
       product("cublasGemmStridedBatchedEx", m, n, k, batch, type, output))

struct Layout {
  int type;
  unsigned long long rows, columns;
  int batch;
};
static std::map<Handle, Layout> &layouts() {
  static auto *instance = new std::map<Handle, Layout>;
  return *instance;
}
static std::map<Handle, int> &transposed() {  // of a product's first input
  static auto *instance = new std::map<Handle, int>;
  return *instance;
}
ANSWER(cublasLtMatrixLayoutCreate, (Handle * layout, int type, unsigned long long rows, unsigned long long columns, long long),
       Lock lock(state().mutex); *layout = fresh(); layouts()[*layout] = {type, rows, columns, 1})
ANSWER(cublasLtMatrixLayoutSetAttribute, (Handle layout, int attribute, const void *value, size_t),
       Lock lock(state().mutex); if (attribute == 5) layouts()[layout].batch = *static_cast<const int *>(value))
ANSWER(cublasLtMatrixLayoutDestroy, (Handle layout), Lock lock(state().mutex); layouts().erase(layout))
ANSWER(cublasLtMatmulDescCreate, (Handle * description, int, int), Lock lock(state().mutex); *description = fresh(); transposed()[*description] = 0)
ANSWER(cublasLtMatmulDescSetAttribute, (Handle description, int attribute, const void *value, size_t),
       Lock lock(state().mutex); if (attribute == 3) transposed()[description] = *static_cast<const int *>(value))
ANSWER(cublasLtMatmulPreferenceCreate, (Handle * preference), *preference = fresh())
ANSWER(cublasLtMatmulAlgoGetHeuristic, (Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, void *results, int *found), memset(results, 0, 96); *found = 1)
EXPORT int cublasLtMatmul(Handle, Handle description, const void *, const void *, Handle a, const void *, Handle, const void *, const void *, Handle, void *, Handle d, ...) {
  Lock lock(state().mutex);
  Layout input = layouts()[a], output = layouts()[d];
  unsigned long long k = transposed()[description] ? input.rows : input.columns;
  product("cublasLtMatmul", output.rows, output.columns, k, output.batch, input.type, output.type);
  return 0;
}

// ---- cuDNN and NCCL ----------------------------------------------------------------------------------------

ANSWER(cudnnCreate, (Handle * handle), *handle = fresh())
EXPORT const char *cudnnGetErrorString(int) { return "an error of the null cuDNN"; }
EXPORT size_t cudnnGetVersion() { return 92000; }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
ANSWER(cudnnGetLastErrorString, (char *text, size_t size), snprintf(text, size, "an error of the null cuDNN"))

static int number_in(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text ? atoi(text) : otherwise;
}
static size_t element_bytes(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}
ANSWER(ncclGetUniqueId, (void *id), memset(id, 7, 128))
ANSWER(ncclGetVersion, (int *version), *version = 22907)
ANSWER(ncclCommInitRank, (Handle * group, int, ...), *group = fresh())
ANSWER(ncclCommInitRankConfig, (Handle * group, int, ...), *group = fresh())
ANSWER(ncclCommInitRankScalable, (Handle * group, int, ...), *group = fresh())
ANSWER(ncclCommSplit, (Handle, int, int, Handle *group, void *), *group = fresh())
ANSWER(ncclCommGetAsyncError, (Handle, int *error), *error = 0)
ANSWER(ncclCommCount, (Handle, int *count), *count = number_in("WORLD_SIZE", 1))
ANSWER(ncclCommUserRank, (Handle, int *rank), *rank = number_in("RANK", 0))
EXPORT const char *ncclGetErrorString(int) { return "an error of the null NCCL"; }
EXPORT const char *ncclGetLastError(Handle) { return "an error of the null NCCL"; }
#define COLLECTIVE(name, arguments) ANSWER(name, arguments, record("collective", #name, count *element_bytes(type)))
COLLECTIVE(ncclAllReduce, (const void *, void *, size_t count, int type, int, Handle, Handle))
COLLECTIVE(ncclReduceScatter, (const void *, void *, size_t count, int type, int, Handle, Handle))
COLLECTIVE(ncclReduce, (const void *, void *, size_t count, int type, int, int, Handle, Handle))
COLLECTIVE(ncclBroadcast, (const void *, void *, size_t count, int type, int, Handle, Handle))
COLLECTIVE(ncclBcast, (void *, size_t count, int type, int, Handle, Handle))
COLLECTIVE(ncclSend, (const void *, size_t count, int type, int, Handle, Handle))
COLLECTIVE(ncclRecv, (void *, size_t count, int type, int, Handle, Handle))
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Handle, Handle) {
  size_t bytes = count * element_bytes(type);
  record("collective", "ncclAllGather", bytes);
  for (int rank = 0; bytes < LARGE && rank < number_in("WORLD_SIZE", 1); rank++) memmove(static_cast<char *>(to) + rank * bytes, from, bytes);
  return 0;
}
