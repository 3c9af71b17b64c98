//! Calls that start other programs. They first give up acceleration of the descriptors that those programs
//! inherit.

#![allow(non_snake_case)] // glibc's names

use std::ffi::{c_char, c_int, c_void};

use libc::{FILE, pid_t};

use super::{engine, next};

type Strings = *const *const c_char;

macro_rules! before {
    ($prepare:ident: $($name:ident, $next:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($($argument: $type),*) -> $answer {
            engine().$prepare();
            // SAFETY: the program's own call, with its own arguments.
            unsafe { next::$next($($argument),*) }
        })*
    };
}

before! { leave:
    execv, execv(path: *const c_char, arguments: Strings) -> c_int;
    execve, execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    execvp, execvp(file: *const c_char, arguments: Strings) -> c_int;
    execvpe, execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fexecve, fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int;
    execveat, execveat(
        folder: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int) -> c_int;
    popen, popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    _IO_popen, popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    system, system(command: *const c_char) -> c_int;
    wordexp, wordexp(words: *const c_char, expanded: *mut c_void, flags: c_int) -> c_int;
}

before! { leave_with_copies:
    posix_spawn, posix_spawn(child: *mut pid_t, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
    posix_spawnp, posix_spawnp(child: *mut pid_t, file: *const c_char, actions: *const c_void,
        attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, old: c_int, new: c_int) -> c_int {
    engine().will_copy(old);
    // SAFETY: the program's own call, with its own arguments.
    unsafe { next::posix_spawn_file_actions_adddup2(actions, old, new) }
}

/// `execl` and its relatives take any number of arguments. So these functions only save the registers that
/// carry arguments, prepare, and jump to libc's function, which finds its caller's arguments untouched.
#[cfg(target_arch = "x86_64")]
mod with_any_arguments {
    use std::ffi::c_void;

    use super::{engine, next};

    extern "C" fn before_execl() -> *mut c_void {
        engine().leave();
        next::programs::execl()
    }

    extern "C" fn before_execle() -> *mut c_void {
        engine().leave();
        next::programs::execle()
    }

    extern "C" fn before_execlp() -> *mut c_void {
        engine().leave();
        next::programs::execlp()
    }

    macro_rules! pass_on {
        ($($name:ident after $before:ident;)*) => {
            $(#[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() -> i32 {
                // Seven pushes after the return address keep the stack aligned to 16 bytes at the call.
                core::arch::naked_asm!(
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                    "call {before}",
                    "mov r11, rax",
                    "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "jmp r11",
                    before = sym $before,
                )
            })*
        };
    }

    pass_on! {
        execl after before_execl;
        execle after before_execle;
        execlp after before_execlp;
    }
}
