/* C interface of libmetalsim: configuration, diagnostics, counters, fault injection, and a direct device
 * for tests that run a kernel without host code. Everything may be called from any thread; calls that
 * touch the simulated device wait for the command buffer that is running. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define METALSIM_API __attribute__((visibility("default")))

/* ---- configuration (environment variables of the same meaning are read once, when the library loads) ----
 */
METALSIM_API void metalsim_set_seed(
    uint64_t seed); /* METALSIM_SEED: 0 runs threads in order, others shuffle */
METALSIM_API void metalsim_set_checks(int enabled); /* METALSIM_CHECKS: checker and checked kernel builds */
METALSIM_API void metalsim_set_max_threads(const char* kernel,
                                           uint32_t limit); /* METALSIM_MAX_THREADS; NULL = all */
METALSIM_API void metalsim_set_working_set(
    uint64_t bytes); /* METALSIM_WORKING_SET: recommendedMaxWorkingSetSize */
METALSIM_API void metalsim_set_max_buffer(uint64_t bytes);  /* METALSIM_MAX_BUFFER: maxBufferLength */
METALSIM_API void metalsim_set_macos(int major, int minor); /* METALSIM_MACOS=15.0: what NSProcessInfo says */
METALSIM_API void metalsim_set_family(const char* architecture,
                                      int apple_family);     /* METALSIM_GPU=applegpu_g13g:7 */
METALSIM_API void metalsim_set_wait_timeout(double seconds); /* METALSIM_WAIT_TIMEOUT: GPU waits for events */

/* ---- diagnostics of the checker ---- */
typedef struct {
    const char* kind;   /* "race-threadgroup", "out-of-bounds", ...; docs/metalsim.md lists them */
    const char* kernel; /* host name, or "" */
    const char* message;
    const char* where; /* file:line in the .metal source, or "" */
    uint64_t count;    /* how often the same report came */
} metalsim_diagnostic;
METALSIM_API size_t metalsim_diagnostic_count(void);
METALSIM_API int metalsim_diagnostic_at(size_t index,
                                        metalsim_diagnostic* out); /* valid until the next clear */
METALSIM_API void metalsim_diagnostics_clear(void);

/* ---- counters ---- */
typedef struct {
    uint64_t command_buffers, encoders, dispatches, barriers;
    uint64_t stages; /* groups of dispatches that nothing orders among themselves */
    uint64_t threads;
    uint64_t bytes_read, bytes_written;  /* buffers; each distinct byte once a dispatch (checked builds) */
    uint64_t bytes_loaded, bytes_stored; /* buffers; every access issued (checked builds) */
    uint64_t constant_bytes;             /* given by setBytes */
} metalsim_counters;
METALSIM_API void metalsim_counters_get(metalsim_counters* out);
METALSIM_API void metalsim_counters_reset(void);

typedef struct {
    const char* kernel;
    uint32_t groups[3], threads[3]; /* threadgroups in the grid, threads in a threadgroup */
    uint64_t stage;                 /* ordinal of the stage it belongs to, from 1 */
    uint64_t bytes_read, bytes_written, bytes_loaded, bytes_stored;
} metalsim_dispatch;
METALSIM_API void metalsim_dispatch_log(int enabled); /* off at start; switching on or off clears it */
METALSIM_API size_t metalsim_dispatch_log_count(void);
METALSIM_API int metalsim_dispatch_log_at(size_t index, metalsim_dispatch* out);

METALSIM_API long metalsim_live_objects(
    const char* class_name);                          /* Objective-C objects; NULL = of all classes */
METALSIM_API uint64_t metalsim_allocated_bytes(void); /* live buffers */

/* ---- fault injection: the nth event of the kind from now on (1 = next) fails, `repeat` times in a row ----
 * kinds: "buffer" "library" "function" "pipeline" "queue" "event" "fence" "residency"  -> nil (and NSError)
 *        "command_buffer" -> ends with status error and `code`;  "timeout" -> the same with code 2, late
 * METALSIM_FAULT=kind:nth[:code[:repeat]],... does the same when the library loads. */
METALSIM_API int metalsim_fault(const char* kind, uint32_t nth, int code,
                                uint32_t repeat); /* 0 = unknown kind */
METALSIM_API void metalsim_faults_clear(void);

/* ---- direct device ---- */
typedef struct metalsim_library metalsim_library;
typedef struct metalsim_buffer metalsim_buffer;
typedef struct metalsim_encoder metalsim_encoder;
METALSIM_API metalsim_library* metalsim_library_open(const char* path); /* NULL: see metalsim_last_error */
METALSIM_API const char* metalsim_last_error(void);                     /* of the calling thread */
METALSIM_API size_t metalsim_library_kernel_count(const metalsim_library*);
METALSIM_API const char* metalsim_library_kernel_name(const metalsim_library*, size_t index);
METALSIM_API uint32_t metalsim_kernel_threadgroup_memory(const metalsim_library*, const char* kernel);
METALSIM_API uint32_t metalsim_kernel_max_threads(const metalsim_library*, const char* kernel);

enum { METALSIM_UNTRACKED = 1, METALSIM_TRACK_INITIALISATION = 2, METALSIM_READ_ONLY = 4 };
METALSIM_API metalsim_buffer* metalsim_buffer_new(uint64_t length, const char* name, unsigned flags);
METALSIM_API void* metalsim_buffer_contents(metalsim_buffer*);
METALSIM_API void metalsim_buffer_free(metalsim_buffer*);

METALSIM_API metalsim_encoder* metalsim_encoder_new(int concurrent);
METALSIM_API void metalsim_encoder_end(metalsim_encoder*);
METALSIM_API int metalsim_encoder_pipeline(metalsim_encoder*, metalsim_library*,
                                           const char* kernel); /* 0 = none */
METALSIM_API void metalsim_encoder_constant(metalsim_encoder*, int index, const void* value, size_t size);
METALSIM_API void metalsim_encoder_buffer(metalsim_encoder*, metalsim_buffer*, uint64_t offset, int index);
METALSIM_API void metalsim_encoder_bytes(metalsim_encoder*, const void* bytes, size_t length, int index);
METALSIM_API void metalsim_encoder_threadgroup_memory(metalsim_encoder*, uint32_t length, int index);
METALSIM_API void metalsim_encoder_barrier(metalsim_encoder*);
METALSIM_API int metalsim_encoder_dispatch(metalsim_encoder*, const uint32_t grid[3], const uint32_t group[3],
                                           int grid_is_threads); /* 0 = abandoned */
#ifdef __cplusplus
}
#endif
