// An H100 that is not there: CUDA, cuBLAS, cuDNN and NCCL as torch and Triton call them, in one library to
// preload. Kernels do nothing and are recorded; memory is lazily mapped host memory. Here are the functions
// for which "0, success" is a wrong answer; build.sh generates all others. `null_*` is the recorder's interface.
#include <driver_types.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
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

struct Region {
  size_t bytes;
  bool on_device;
  int device;  // -1: pinned, or nothing mapped yet
};

struct State {
  std::recursive_mutex mutex;
  bool recording = false;
  std::vector<Event> events;
  std::unordered_map<const void *, std::string> kernel_names;
  std::map<uintptr_t, Region> regions;
  std::map<unsigned long long, std::pair<size_t, int>> segments;  // handle of cuMemCreate -> bytes, device
  std::unordered_map<const void *, int> owners;                   // stream, event, module or kernel -> device
  std::array<size_t, 64> used{};
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

// NULL_GPUS devices, in this order; CUDA_VISIBLE_DEVICES is read at the first call, as CUDA does. A device's
// context starts like CUDA's: at cudaSetDevice, or at the first call that needs one.
static const int MAX_DEVICES = 64;
static const char *NAME = "NVIDIA H100 80GB HBM3";
static int number_in(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text ? atoi(text) : otherwise;
}
static int num_physical() { return number_in("NULL_GPUS", 1); }
static std::string uuid_of(int physical, const char *kind = "GPU") {
  char text[64];
  snprintf(text, sizeof text, "%s-%02x020304-0506-0708-090a-0b0c0d0e0f%02x", kind, physical + 1, physical + 1);
  return text;
}
static const std::vector<int> &visible() {
  static const std::vector<int> found = [] {
    std::vector<int> numbers;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !text && i < num_physical(); i++) numbers.push_back(i);
    std::istringstream rest(text ? text : "");
    for (std::string one; std::getline(rest, one, ',');) {
      int number = -1;
      for (int i = 0; i < num_physical(); i++) if (one == std::to_string(i) || one == uuid_of(i) || one == uuid_of(i, "MIG")) number = i;
      if (number < 0) return numbers;  // later ones are ignored
      if (std::count(numbers.begin(), numbers.end(), number)) return std::vector<int>{};
      numbers.push_back(number);
      if (one[0] == 'M') return numbers;  // a process gets only one slice
    }
    return numbers;
  }();
  return found;
}
static int count_visible() { return visible().size(); }
static thread_local int current = 0;
static thread_local bool bound = false;  // whether this thread has a current context
static thread_local int last_error = 0;
static std::atomic<bool> contexts[MAX_DEVICES];

static int log_file() {
  static int file = [] {
    const char *directory = getenv("NULL_LOG");
    if (!directory) return -1;
    const char *host = getenv("NULL_HOST");
    std::string path = std::string(directory) + "/" + (host ? host : "") + std::to_string(getpid()) + ".log";
    return open(path.c_str(), O_CREAT | O_APPEND | O_WRONLY, 0644);
  }();
  return file;
}
static void say(const std::string &line, bool with_stack) {
  if (log_file() < 0) return;
  const char *rank = getenv("RANK");
  std::string text = "pid " + std::to_string(getpid()) + "\trank " + (rank ? rank : "-") + "\t" + line + "\n";
  write(log_file(), text.data(), text.size());
  auto thread_state = (void *(*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  auto dump = (const char *(*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  if (void *python = with_stack && thread_state && dump ? thread_state() : nullptr) dump(log_file(), python);
}
static int fail(int code, const std::string &why) {
  say("VIOLATION\t" + why + ", error " + std::to_string(code), true);
  return last_error = code;
}
static int use(int device) {  // the device's context is needed
  if (device < 0 || device >= count_visible()) return last_error = count_visible() ? 101 : 100;
  if (device == current) bound = true;
  if (!contexts[device].exchange(true)) say("CONTEXT\tdevice " + std::to_string(device) + " physical " + std::to_string(visible()[device]), true);
  return 0;
}
static int use() { return use(current); }
static void own(Handle handle, int device) {
  Lock lock(state().mutex);
  state().owners[handle] = device;
}
static int owner(Handle handle) {  // of a stream, event or kernel; the null streams are the current device's
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return current;
  Lock lock(state().mutex);
  auto found = state().owners.find(handle);
  return found == state().owners.end() ? current : found->second;
}
static int check_stream(Handle stream, const char *what) {
  if (int error = use()) return error;
  int device = owner(stream);
  if (device == current) return 0;
  return fail(400, std::string(what) + " on a stream of device " + std::to_string(device) + ", current " + std::to_string(current));
}

EXPORT int cudaGetDeviceCount(int *count) {
  *count = count_visible();
  return *count ? 0 : (last_error = 100);
}
ANSWER(cudaGetDevice, (int *device), if (!count_visible()) return last_error = 100; *device = current)
EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device >= count_visible()) return fail(count_visible() ? 101 : 100, "cudaSetDevice(" + std::to_string(device) + ") of " + std::to_string(count_visible()));
  current = device;
  return use();
}
EXPORT int cuInit(unsigned) { return count_visible() ? 0 : 100; }
ANSWER(cudaGetLastError, (), int code = last_error; last_error = 0; if (code) return code)
ANSWER(cudaPeekAtLastError, (), if (last_error) return last_error)
ANSWER(cuDeviceGetCount, (int *count), *count = count_visible())
ANSWER(cuDeviceGet, (int *device, int ordinal), if (ordinal >= count_visible()) return 101; *device = ordinal)
ANSWER(cuDeviceGetUuid, (void *to, int device), memset(to, 7, 16); memset(to, visible()[device] + 1, 1))
ANSWER(cudaRuntimeGetVersion, (int *version), *version = 13000)
ANSWER(cudaDriverGetVersion, (int *version), *version = 13000)
ANSWER(cuDriverGetVersion, (int *version), *version = 13000)
ANSWER(cudaDeviceCanAccessPeer, (int *can, int one, int other), *can = one != other)
ANSWER(cudaDeviceGetPCIBusId, (char *text, int size, int device), snprintf(text, size, "0000:%02x:00.0", visible()[device] + 1))
EXPORT const char *cudaGetErrorString(int code) {
  return code == 0 ? "no error" : code == 2 ? "out of memory" : code == 100 ? "no CUDA-capable device is detected" : code == 101 ? "invalid device ordinal" :
         code == 400 ? "invalid resource handle" : code == 600 ? "device not ready" : "an error of the null GPU";
}

// NVML, which Ray and torch read; it ignores CUDA_VISIBLE_DEVICES
static Handle nvml_handle(unsigned physical) { return reinterpret_cast<Handle>(uintptr_t(0x9000 + physical)); }
static int nvml_index(Handle handle) { return int(reinterpret_cast<uintptr_t>(handle) - 0x9000); }
EXPORT int nvmlInit_v2() { return num_physical() ? 0 : 9; }
ANSWER(nvmlInit, ())
ANSWER(nvmlInitWithFlags, (unsigned))
ANSWER(nvmlShutdown, ())
EXPORT const char *nvmlErrorString(int) { return "an error of the null NVML"; }
ANSWER(nvmlDeviceGetCount_v2, (unsigned *count), *count = num_physical())
ANSWER(nvmlDeviceGetHandleByIndex_v2, (unsigned index, Handle *handle), if (int(index) >= num_physical()) return 2; *handle = nvml_handle(index))
ANSWER(nvmlDeviceGetHandleByPciBusId_v2, (const char *text, Handle *handle), unsigned domain = 0, bus = 1; sscanf(text, "%x:%x", &domain, &bus); *handle = nvml_handle(bus - 1))
ANSWER(nvmlDeviceGetName, (Handle, char *text, unsigned size), snprintf(text, size, "%s", NAME))
ANSWER(nvmlDeviceGetUUID, (Handle handle, char *text, unsigned size), snprintf(text, size, "%s", uuid_of(nvml_index(handle)).c_str()))
ANSWER(nvmlDeviceGetIndex, (Handle handle, unsigned *index), *index = nvml_index(handle))
ANSWER(nvmlDeviceGetMemoryInfo, (Handle, unsigned long long *to), to[0] = TOTAL_BYTES; to[1] = USABLE_BYTES; to[2] = TOTAL_BYTES - USABLE_BYTES)
ANSWER(nvmlDeviceGetUtilizationRates, (Handle, unsigned *to), to[0] = 50; to[1] = 10)
ANSWER(nvmlDeviceGetMigMode, (Handle, unsigned *now, unsigned *pending), *now = *pending = 0)
ANSWER(nvmlDeviceGetComputeRunningProcesses_v3, (Handle, unsigned *count, void *), *count = 0)
ANSWER(nvmlDeviceGetComputeRunningProcesses_v2, (Handle, unsigned *count, void *), *count = 0)
ANSWER(nvmlDeviceGetComputeRunningProcesses, (Handle, unsigned *count, void *), *count = 0)
ANSWER(nvmlDeviceGetGraphicsRunningProcesses_v3, (Handle, unsigned *count, void *), *count = 0)
ANSWER(nvmlDeviceGetGraphicsRunningProcesses_v2, (Handle, unsigned *count, void *), *count = 0)
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, int *) { return 3; }  // not supported
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void *) { return 3; }
ANSWER(nvmlDeviceGetGpuFabricInfoV, (Handle, void *))
EXPORT const char *cudaGetErrorName(int) { return "nullError"; }

EXPORT int cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (device < 0 || device >= count_visible()) return fail(101, "properties of device " + std::to_string(device));
  int physical = visible()[device];
  memset(p, 0, sizeof *p);
  strcpy(p->name, NAME);
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = i + 1;
  p->uuid.bytes[0] = p->uuid.bytes[15] = physical + 1;
  if (const char *host = getenv("NULL_HOST")) strncpy(p->uuid.bytes + 4, host, 8);  // simulated hosts have different GPUs
  p->pciBusID = physical + 1;
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
  if (use()) return nullptr;
  size_t whole = (bytes + 4095) & ~size_t{4095};
  void *at = mapped(whole);
  Lock lock(state().mutex);
  if (at) state().regions[reinterpret_cast<uintptr_t>(at)] = {whole, on_device, on_device ? current : -1};
  if (at && on_device) state().used[current] += whole;
  return at;
}

static void drop(void *pointer) {
  Lock lock(state().mutex);
  auto found = state().regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().regions.end()) return;
  auto [bytes, on_device, device] = found->second;
  munmap(pointer, bytes);
  if (on_device && device >= 0) state().used[device] -= bytes;
  state().regions.erase(found);
}

enum Where { PAGEABLE, PINNED, DEVICE };

static Region region_of(const void *pointer) {  // bytes: from the pointer on; 0 for pageable memory
  Lock lock(state().mutex);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto next = state().regions.upper_bound(at);
  if (next == state().regions.begin()) return {0, false, -1};
  auto [start, region] = *--next;
  if (at >= start + region.bytes) return {0, false, -1};
  return {start + region.bytes - at, region.on_device, region.device};
}
static Where where(const void *pointer) {
  Region region = region_of(pointer);
  return !region.bytes ? PAGEABLE : region.on_device ? DEVICE : PINNED;
}

static void copy(void *to, const void *from, size_t bytes) {
  if (where(to) == DEVICE && where(from) == DEVICE && bytes > LARGE) return;
  memcpy(to, from, bytes);
}

static void fill(void *to, int value, size_t bytes) {
  if (bytes < LARGE) memset(to, value, bytes);  // new memory is zero already
}

// ---- what a stream waits for: collectives that every rank must have posted -------------------------------------
// A shared file per communicator counts what each rank has posted. A collective is done when all ranks have
// posted it; streams and events carry the posts before them, so waiting on the host hangs as on real GPUs.
static const int MAX_RANKS = 64;
struct Shared {
  std::atomic<int> joined;
  int physical[MAX_RANKS];
  char host[MAX_RANKS][32];
  std::atomic<uint64_t> posted[MAX_RANKS], sent[MAX_RANKS][MAX_RANKS], received[MAX_RANKS][MAX_RANKS];
};
struct Group {
  Shared *shared;
  std::string id;
  int rank, size, device;
  std::atomic<bool> aborted{false};
  uint64_t calls = 0;
};
using Needs = std::map<std::pair<Group *, int>, uint64_t>;  // slot -1: collectives; peer: sends; MAX_RANKS + peer: receives

static bool is_met(Group *group, int slot, uint64_t number) {
  if (group->aborted) return true;
  if (slot >= MAX_RANKS) return group->shared->sent[slot - MAX_RANKS][group->rank] >= number;
  if (slot >= 0) return group->shared->received[slot][group->rank] >= number;
  for (int rank = 0; rank < group->size; rank++) if (group->shared->posted[rank] < number) return false;
  return true;
}
static void prune(Needs &needs) {
  for (auto it = needs.begin(); it != needs.end();) it = is_met(it->first.first, it->first.second, it->second) ? needs.erase(it) : std::next(it);
}
static std::map<Handle, Needs> &needs_of() {  // of streams and events
  static auto *instance = new std::map<Handle, Needs>;
  return *instance;
}
static Handle key(Handle stream) {
  return reinterpret_cast<uintptr_t>(stream) <= 2 ? reinterpret_cast<Handle>(uintptr_t(0x10 + current)) : stream;
}
static void add_needs(Handle to, Handle from) {
  Lock lock(state().mutex);
  auto found = needs_of().find(from);
  if (found == needs_of().end()) return;
  prune(found->second);
  for (auto &[what, number] : found->second) { auto &now = needs_of()[to][what]; if (now < number) now = number; }
}
static bool is_done(Handle which) {
  Lock lock(state().mutex);
  auto found = needs_of().find(which);
  if (found == needs_of().end()) return true;
  prune(found->second);
  return found->second.empty();
}
static void await(Handle which) {
  for (long waited = 0; !is_done(which); waited++) {
    usleep(500);
    if (waited == 20000) say("BLOCKED\ta wait for the device for more than 10 s", true);
  }
}
static void await_device() {
  std::vector<Handle> streams;
  {
    Lock lock(state().mutex);
    for (auto &[which, needs] : needs_of()) if (which == key(nullptr) || owner(which) == current) streams.push_back(which);
  }
  for (Handle one : streams) await(one);
}

EXPORT int cudaMalloc(void **pointer, size_t bytes) {
  if (int error = use()) return error;
  if (state().used[current] + bytes > USABLE_BYTES) return last_error = cudaErrorMemoryAllocation;
  *pointer = take(bytes, true);
  return *pointer ? 0 : cudaErrorMemoryAllocation;
}
ANSWER(cudaFree, (void *pointer), if (int error = use()) return error; if (pointer) { record("wait", "cudaFree"); await_device(); drop(pointer); })
ANSWER(cudaHostAlloc, (void **pointer, size_t bytes, unsigned), *pointer = take(bytes, false))
ANSWER(cudaFreeHost, (void *pointer), drop(pointer))
ANSWER(cudaMemGetInfo, (size_t *left, size_t *total), if (int error = use()) return error; *left = USABLE_BYTES - state().used[current]; *total = TOTAL_BYTES)
ANSWER(cudaGetSymbolAddress, (void **pointer, const void *), *pointer = take(1 << 16, true))
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, void *stream) {
  if (int error = use()) return error;
  if (where(to) == PAGEABLE) await(key(stream));
  static const char *names[] = {"host, blocks", "pinned", "device"};
  record("copy", std::string(names[where(from)]) + " to " + names[where(to)], bytes);
  copy(to, from, bytes);
  return 0;
}
ANSWER(cudaMemcpy, (void *to, const void *from, size_t bytes, int), record("wait", "cudaMemcpy", bytes); await(key(nullptr)); copy(to, from, bytes))
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
  attributes->device = attributes->type == cudaMemoryTypeDevice ? region_of(pointer).device : current;
  attributes->devicePointer = const_cast<void *>(pointer);
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void *>(pointer);
  return 0;
}
EXPORT int cuPointerGetAttribute(void *to, int attribute, unsigned long long pointer) {
  if (attribute == 9) *static_cast<int *>(to) = region_of(reinterpret_cast<void *>(pointer)).device;
  else *static_cast<unsigned long long *>(to) = pointer;
  return 0;
}

// Segments that grow: address ranges, and the memory behind them.
EXPORT int cuMemAddressReserve(unsigned long long *address, size_t bytes, size_t, unsigned long long, unsigned long long) {
  void *at = mapped(bytes);
  if (!at) return 2;
  Lock lock(state().mutex);
  state().regions[reinterpret_cast<uintptr_t>(at)] = {bytes, true, -1};
  *address = reinterpret_cast<uintptr_t>(at);
  return 0;
}
EXPORT int cuMemAddressFree(unsigned long long address, size_t bytes) {
  Lock lock(state().mutex);
  munmap(reinterpret_cast<void *>(address), bytes);
  state().regions.erase(address);
  return 0;
}
EXPORT int cuMemCreate(unsigned long long *handle, size_t bytes, void *properties, unsigned long long) {
  int device = static_cast<int *>(properties)[3];  // CUmemAllocationProp: type, handle types, location type, location id
  if (device < 0 || device >= count_visible()) return fail(101, "cuMemCreate on device " + std::to_string(device));
  if (state().used[device] + bytes > USABLE_BYTES) return 2;
  Lock lock(state().mutex);
  state().used[device] += bytes;
  *handle = reinterpret_cast<uintptr_t>(fresh());
  state().segments[*handle] = {bytes, device};
  return 0;
}
EXPORT int cuMemMap(unsigned long long address, size_t, size_t, unsigned long long handle, unsigned long long) {
  Lock lock(state().mutex);
  auto next = state().regions.upper_bound(address);
  int device = state().segments[handle].second;
  if (next == state().regions.begin()) return fail(1, "cuMemMap outside a reserved range");
  Region &region = (--next)->second;
  if (region.device >= 0 && region.device != device) return fail(1, "a range with memory of two devices");
  region.device = device;
  return 0;
}
EXPORT int cuMemRelease(unsigned long long handle) {
  Lock lock(state().mutex);
  auto [bytes, device] = state().segments[handle];
  state().used[device] -= bytes;
  state().segments.erase(handle);
  return 0;
}
ANSWER(cuMemGetAllocationGranularity, (size_t *bytes, void *, int), *bytes = 2 << 20)

// ---- streams and events ------------------------------------------------------------------------------------

ANSWER(cudaStreamCreate, (Handle *stream), if (int error = use()) return error; *stream = fresh(); own(*stream, current))
ANSWER(cudaStreamCreateWithFlags, (Handle *stream, unsigned), if (int error = use()) return error; *stream = fresh(); own(*stream, current))
ANSWER(cudaStreamCreateWithPriority, (Handle *stream, unsigned, int), if (int error = use()) return error; *stream = fresh(); own(*stream, current))
ANSWER(cudaStreamGetPriority, (Handle, int *priority), *priority = 0)
ANSWER(cudaStreamIsCapturing, (Handle, int *status), *status = 0)
ANSWER(cudaStreamGetCaptureInfo, (Handle, int *status, unsigned long long *id, void *, void *, void *, void *), *status = 0; if (id) *id = 0)
ANSWER(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), if (least) *least = 0; if (greatest) *greatest = -5)
ANSWER(cudaEventCreate, (Handle *event), if (int error = use()) return error; *event = fresh(); own(*event, current))
ANSWER(cudaEventCreateWithFlags, (Handle *event, unsigned), if (int error = use()) return error; *event = fresh(); own(*event, current))
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
static int record_event(Handle event, Handle stream) {
  if (owner(event) != owner(stream)) return fail(400, "an event of device " + std::to_string(owner(event)) + " recorded on a stream of device " + std::to_string(owner(stream)));
  note(event);
  Lock lock(state().mutex);
  needs_of().erase(event);
  add_needs(event, key(stream));
  return 0;
}
EXPORT int cudaEventRecord(Handle event, Handle stream) { return record_event(event, stream); }
EXPORT int cudaEventRecordWithFlags(Handle event, Handle stream, unsigned) { return record_event(event, stream); }
EXPORT int cudaEventQuery(Handle event) { return is_done(event) ? 0 : (last_error = 600); }
EXPORT int cudaStreamQuery(Handle stream) { return is_done(key(stream)) ? 0 : (last_error = 600); }
ANSWER(cudaStreamWaitEvent, (Handle stream, Handle event, unsigned), add_needs(key(stream), event))
ANSWER(cudaEventDestroy, (Handle event), Lock lock(state().mutex); needs_of().erase(event))
ANSWER(cudaStreamDestroy, (Handle stream), Lock lock(state().mutex); needs_of().erase(stream))
ANSWER(cudaEventElapsedTime, (float *milliseconds, Handle from, Handle to),
       if (owner(from) != owner(to)) return fail(400, "time between events of two devices");
       if (!is_done(from) || !is_done(to)) return last_error = 600;
       Lock lock(state().mutex); *milliseconds = (event_times()[to] - event_times()[from]) * 1e3)
ANSWER(cudaStreamSynchronize, (Handle stream), record("wait", "cudaStreamSynchronize"); if (int error = use()) return error; await(key(stream)))
ANSWER(cudaDeviceSynchronize, (), record("wait", "cudaDeviceSynchronize"); if (int error = use()) return error; await_device())
ANSWER(cudaEventSynchronize, (Handle event), record("wait", "cudaEventSynchronize"); await(event))

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
ANSWER(__cudaLaunchKernel, (void *kernel, dim3, dim3, void **, size_t, Handle stream), if (int error = check_stream(stream, "a kernel")) return error; record("kernel", name_of(kernel)))
ANSWER(cudaLaunchKernel, (const void *kernel, dim3, dim3, void **, size_t, Handle stream), if (int error = check_stream(stream, "a kernel")) return error; record("kernel", name_of(kernel)))
ANSWER(cudaLaunchCooperativeKernel, (const void *kernel, dim3, dim3, void **, size_t, Handle stream), if (int error = check_stream(stream, "a kernel")) return error; record("kernel", name_of(kernel)))
ANSWER(cudaLaunchKernelExC, (const cudaLaunchConfig_t *config, const void *kernel, void **), if (int error = check_stream(config->stream, "a kernel")) return error; record("kernel", name_of(kernel)))
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
static Handle context_of(int device) { return reinterpret_cast<Handle>(uintptr_t(0x500 + 16 * device)); }
ANSWER(cuCtxGetCurrent, (Handle * now), *now = bound ? context_of(current) : nullptr)
ANSWER(cuCtxGetDevice, (int *device), *device = current)
ANSWER(cuCtxSetCurrent, (Handle now), if (now) current = (reinterpret_cast<uintptr_t>(now) - 0x500) / 16; bound = now != nullptr)
ANSWER(cuDevicePrimaryCtxRetain, (Handle * now, int device), if (int error = use(device)) return error; *now = context_of(device))
ANSWER(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), *flags = 0; *active = contexts[device])
ANSWER(cuModuleLoad, (Handle * module, const char *), if (!bound) return fail(201, "a module without a context"); *module = fresh(); own(*module, current))
ANSWER(cuModuleLoadData, (Handle * module, const void *), if (!bound) return fail(201, "a module without a context"); *module = fresh(); own(*module, current))
ANSWER(cuModuleLoadDataEx, (Handle * module, const void *), if (!bound) return fail(201, "a module without a context"); *module = fresh(); own(*module, current))
ANSWER(cuModuleGetFunction, (Handle * kernel, Handle module, const char *text), *kernel = fresh(); own(*kernel, owner(module)); name(*kernel, text))
ANSWER(cuFuncGetAttribute, (int *value, int number, Handle), *value = number == 0 ? 1024 : number == 4 ? 32 : 0)
static int launch(Handle kernel, Handle stream) {
  if (!bound) return fail(201, "a Triton kernel without a context");
  if (owner(kernel) != current) return fail(400, "a Triton kernel of device " + std::to_string(owner(kernel)) + ", current " + std::to_string(current));
  if (int error = check_stream(stream, "a Triton kernel")) return error;
  record("triton", name_of(kernel));
  return 0;
}
EXPORT int cuLaunchKernel(Handle kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream, void **, void **) { return launch(kernel, stream); }
EXPORT int cuLaunchKernelEx(const void *config, Handle kernel, void **, void **) {
  return launch(kernel, *reinterpret_cast<const Handle *>(static_cast<const char *>(config) + 32));  // CUlaunchConfig.hStream
}

// ---- cuBLAS: matrix products with sizes (m, n, k, batch) and types (inputs, output) ------------------------

static void product(const char *text, long long m, long long n, long long k, long long batch, long long inputs, long long output) {
  record("product", text, 0, {m, n, k, batch, inputs, output});
}
ANSWER(cublasCreate_v2, (Handle * handle), if (use()) return 1; *handle = fresh(); own(*handle, current))
EXPORT int cublasSetStream_v2(Handle handle, Handle stream) {
  if (owner(handle) == owner(stream)) return 0;
  fail(400, "cuBLAS of device " + std::to_string(owner(handle)) + " with a stream of device " + std::to_string(owner(stream)));
  return 7;
}
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

static size_t element_bytes(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
struct UniqueId { unsigned char bytes[128]; };
static thread_local std::string nccl_error = "none";
static thread_local int in_group = 0;
EXPORT const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "an error of the null NCCL"; }
EXPORT const char *ncclGetLastError(Handle) { return nccl_error.c_str(); }
EXPORT int ncclGetUniqueId(UniqueId *id) {
  int file = open("/dev/urandom", O_RDONLY);
  bool read_all = read(file, id, sizeof *id) == sizeof *id;
  close(file);
  return read_all ? 0 : 2;
}
static int nccl_fail(const std::string &why) {
  nccl_error = why;
  fail(5, why);
  last_error = 0;
  return 5;
}
static int join(Group **made, const UniqueId &id, int rank, int size) {
  if (size > MAX_RANKS) return nccl_fail("too many ranks");
  if (use()) return 1;
  auto group = new Group;
  char hex[33];
  for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", id.bytes[i]);
  group->id = std::string(hex, 12), group->rank = rank, group->size = size, group->device = current;
  const char *directory = getenv("NULL_LOG"), *host = getenv("NULL_HOST");
  if (!directory) {  // the other ranks are pretended, as in check.py: nobody waits for them
    group->shared = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    group->aborted = true;
    *made = group;
    return 0;
  }
  std::string path = std::string(directory) + "/comm-" + hex;
  int file = open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return nccl_fail("cannot open " + path);
  group->shared = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  int physical = visible()[current];
  say("INIT\t" + group->id + "\trank " + std::to_string(rank) + " of " + std::to_string(size) + "\tdevice " + std::to_string(current) + "\tphysical " + std::to_string(physical), true);
  group->shared->physical[rank] = physical;
  strncpy(group->shared->host[rank], host ? host : "here", 31);
  group->shared->joined++;
  for (long waited = 0; group->shared->joined < size; waited++) {
    usleep(500);
    if (waited == 20000) say("BLOCKED\tncclCommInitRank for more than 10 s", true);
  }
  for (int one = 0; one < size; one++)
    for (int other = 0; other < one; other++)
      if (group->shared->physical[one] == group->shared->physical[other] && !strcmp(group->shared->host[one], group->shared->host[other]))
        return nccl_fail("Duplicate GPU detected : rank " + std::to_string(other) + " and rank " + std::to_string(one) + " both on CUDA device " + std::to_string(physical));
  *made = group;
  return 0;
}
EXPORT int ncclCommInitRank(Group **group, int size, UniqueId id, int rank) { return join(group, id, rank, size); }
EXPORT int ncclCommInitRankConfig(Group **group, int size, UniqueId id, int rank, void *) { return join(group, id, rank, size); }
EXPORT int ncclCommInitRankScalable(Group **group, int size, int rank, int, UniqueId *id, void *) { return join(group, *id, rank, size); }
EXPORT int ncclCommSplit(Group *, int, int, Group **, void *) { return nccl_fail("ncclCommSplit is not modeled"); }
ANSWER(ncclGetVersion, (int *version), *version = 22907)
ANSWER(ncclCommGetAsyncError, (Handle, int *error), *error = 0)
ANSWER(ncclCommCount, (Group * group, int *count), *count = group->size)
ANSWER(ncclCommUserRank, (Group * group, int *rank), *rank = group->rank)
ANSWER(ncclCommCuDevice, (Group * group, int *device), *device = group->device)
ANSWER(ncclCommAbort, (Group * group), say("ABORT\t" + group->id, true); group->aborted = true)
ANSWER(ncclCommDestroy, (Group * group), say("DESTROY\t" + group->id, false))
ANSWER(ncclGroupStart, (), in_group++)
ANSWER(ncclGroupEnd, (), in_group--)

static int check_buffer(Group *group, const void *pointer, size_t bytes, const char *what) {
  if (!bytes) return 0;
  Region region = region_of(pointer);
  if (!region.on_device) return nccl_fail(std::string(what) + ": a buffer in host memory");
  if (region.device != group->device) return nccl_fail(std::string(what) + ": a buffer on device " + std::to_string(region.device) + " in a communicator of device " + std::to_string(group->device));
  if (region.bytes < bytes) return nccl_fail(std::string(what) + ": a buffer that ends early");
  return 0;
}
// Post a call; `what` has all that must be alike on all ranks.
static int post(Group *group, Handle stream, const std::string &what, size_t bytes, int slot = -1) {
  if (owner(stream) != group->device) return nccl_fail(what + ": a stream of device " + std::to_string(owner(stream)) + " in a communicator of device " + std::to_string(group->device));
  record("collective", what, bytes);
  say("CALL\t" + group->id + "\t" + std::to_string(group->rank) + "\t" + std::to_string(group->calls++) + "\t" + what, false);
  Lock lock(state().mutex);
  uint64_t number;
  if (slot >= MAX_RANKS) number = ++group->shared->received[group->rank][slot - MAX_RANKS];
  else if (slot >= 0) number = ++group->shared->sent[group->rank][slot];
  else number = ++group->shared->posted[group->rank];
  needs_of()[key(stream)][{group, slot}] = number;
  return 0;
}
static std::string numbers(size_t count, int type, int third) { return " " + std::to_string(count) + " type " + std::to_string(type) + " op/root " + std::to_string(third); }
#define CHECK(...) if (int error = check_buffer(group, __VA_ARGS__)) return error;
EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Group *group, Handle stream) {
  size_t bytes = count * element_bytes(type);
  CHECK(from, bytes, "ncclAllReduce") CHECK(to, bytes, "ncclAllReduce")
  return post(group, stream, "ncclAllReduce" + numbers(count, type, op), bytes);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Group *group, Handle stream) {
  size_t bytes = count * element_bytes(type);
  CHECK(from, bytes * group->size, "ncclReduceScatter") CHECK(to, bytes, "ncclReduceScatter")
  return post(group, stream, "ncclReduceScatter" + numbers(count, type, op), bytes);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Group *group, Handle stream) {
  CHECK(from, count * element_bytes(type), "ncclReduce")
  return post(group, stream, "ncclReduce" + numbers(count, type, op * 100 + root), count * element_bytes(type));
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Group *group, Handle stream) {
  CHECK(to, count * element_bytes(type), "ncclBroadcast")
  return post(group, stream, "ncclBroadcast" + numbers(count, type, root), count * element_bytes(type));
}
EXPORT int ncclBcast(void *to, size_t count, int type, int root, Group *group, Handle stream) { return ncclBroadcast(to, to, count, type, root, group, stream); }
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Group *group, Handle stream) {
  size_t bytes = count * element_bytes(type);
  CHECK(from, bytes, "ncclAllGather") CHECK(to, bytes * group->size, "ncclAllGather")
  for (int rank = 0; bytes < LARGE && rank < group->size; rank++) memmove(static_cast<char *>(to) + rank * bytes, from, bytes);
  return post(group, stream, "ncclAllGather" + numbers(count, type, 0), bytes);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Group *group, Handle stream) {
  size_t bytes = count * element_bytes(type) * group->size;
  CHECK(from, bytes, "ncclAlltoAll") CHECK(to, bytes, "ncclAlltoAll")
  return post(group, stream, "ncclAlltoAll" + numbers(count, type, 0), bytes);
}
EXPORT int ncclSend(const void *from, size_t count, int type, int peer, Group *group, Handle stream) {
  CHECK(from, count * element_bytes(type), "ncclSend")
  return post(group, stream, "ncclSend" + numbers(count, type, peer), count * element_bytes(type), peer);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, Group *group, Handle stream) {
  CHECK(to, count * element_bytes(type), "ncclRecv")
  return post(group, stream, "ncclRecv" + numbers(count, type, peer), count * element_bytes(type), MAX_RANKS + peer);
}
