//! `libfarpool_preload.so`: positional reads and writes of files on a Farpool mount, served within the
//! process; and reads of files on a local disk through the page cache ([`cached`]), if the environment names
//! a directory.
//!
//! I1. An accelerated call acts on the open file description that the descriptor names at that moment: the
//!     kernel is asked each time ([`identity`]). What the table of descriptors remembers is a hint. So a
//!     descriptor that was closed or replaced without the library's knowledge costs speed, never bytes.
//! I2. A call that the library does not know, cannot serve, or is not sure of goes to the kernel, with the
//!     arguments that the program gave and with `errno` as it was. (With a page cache, `O_TRUNC` becomes a
//!     truncation after the file was opened, and a page that is written goes to the kernel from a copy.)
//! I3. Acceleration of a description ends before it is mapped, passed to another process, or left open across
//!     an `exec`.
//! I4. Without a page cache, a program that never makes a positional call on a file of a mount is left alone:
//!     no thread, no allocation, no descriptor, no output.
//! I5. While a thread holds a lock of the library, it does nothing that could wait for that lock. A thread
//!     that finds the table locked asks the kernel.
//!
//! **Signals.** A thread that is within the library is marked ([`entry`]). If a signal handler interrupts it
//! and makes a hooked call, that call goes straight to the kernel. So each hook is as async-signal-safe as
//! the function that it replaces: memory that the library needs is its own, not libc's. A handler must not
//! leave an interrupted positional call by `longjmp`: that thread would not be accelerated
//! again, and giving up the file's acceleration would wait for it until the mount's deadline.
//!
//! **Threads.** Deferred cancellation is disabled while a thread is within the library.
//!
//! **Forks.** The state of one process lies behind a page that the kernel clears in the child of a fork,
//! however the child was made ([`process`]); the child builds its own state on its first call. A `vfork`
//! child, which runs in its parent's memory, changes nothing there.
//!
//! Not here: the protocol with the mount (it plugs in at [`backend`]), and calls that the kernel serves
//! alone, such as `read`, `lseek` and `io_uring`. Calls that change files without a position are hooked for
//! the page cache, which has to know of them; the kernel carries them out.

/// Memory of the library's own. A signal handler may have interrupted libc's allocator, and may use hooked
/// calls. It finds this one free, unless it has interrupted the library; then the call goes to the kernel
/// ([`entry`]).
#[global_allocator]
static MEMORY: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

pub mod backend;
pub mod cached;
pub mod engine;
mod entry;
mod hooks;
mod hosts;
mod identity;
mod leaving;
mod mounts;
pub mod patching;
mod process;
mod sys;
mod table;

pub use hooks::{
    cache_switch, cached_files, set_cached_files_pinned, sign_cached_files, switch_on_cache, use_backend,
};
