//! Which system calls each kind of thread may make, and the filters (seccomp(2)) that hold it to them.
//!
//! 1. A list names what a thread is seen to need: the standard library, glibc and our own code. What is missing here kills
//!    the daemon, so whoever adds a call to a thread adds it to the list.
//! 2. Filters are inherited, and all that a thread has must agree. So what a thread may do, the thread that starts it must
//!    be allowed too: the device's control thread starts workers, the control socket's thread its clients.
//! 3. Nobody may start a program, become somebody else, make memory executable, or open a file for writing.
//! 4. Calls that libraries try and can do without fail with ENOSYS instead, as on a kernel that has none of them: clone3,
//!    whose flags no filter can see, so that glibc takes clone; and what a backtrace does to find names of functions.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::{Kind, Mode};

/// The filters of one kind of thread, in the order in which they are to be installed.
pub(super) fn filters(kind: Kind, mode: Mode) -> Result<Vec<BpfProgram>, BackendError> {
    let violated = match mode {
        Mode::Off => return Ok(Vec::new()),
        Mode::Log => SeccompAction::Log,
        Mode::Kill => SeccompAction::KillProcess,
    };
    // Of all filters the severest verdict counts. So what is to fail is allowed by the list and refused beside it; what
    // is only logged must not fail.
    let absent: Vec<Call> = match mode {
        Mode::Log => vec![CLONE3],
        _ => absent(kind).collect(),
    };
    let allowed = allowed(kind).chain(absent.iter().copied());
    Ok(vec![
        program(
            absent.iter().copied(),
            SeccompAction::Errno(libc::ENOSYS as u32),
            SeccompAction::Allow,
        )?,
        program(allowed, SeccompAction::Allow, violated)?,
    ])
}

fn program(
    calls: impl Iterator<Item = Call>,
    listed: SeccompAction,
    others: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut unconditional = Vec::new();
    for call in calls {
        match call.rule()? {
            Some(rule) => rules.entry(call.number).or_default().push(rule),
            None => unconditional.push(call.number),
        }
    }
    // No rule at all means any arguments, and stands above all rules that other lists have for the call.
    rules.extend(unconditional.into_iter().map(|number| (number, Vec::new())));
    SeccompFilter::new(rules, others, listed, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// A system call, with these arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    number: c_long,
    only: Only,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Only {
    /// Any arguments.
    Any,
    /// The argument's low 32 bits are this.
    Is(u8, u64),
    /// The argument's low 32 bits, less those outside the mask, are this.
    Bits(u8, u32, u32),
    /// The argument is a null pointer.
    Null(u8),
    /// The argument is this process.
    Ourselves(u8),
}

impl Call {
    fn rule(&self) -> Result<Option<SeccompRule>, BackendError> {
        let condition = match self.only {
            Only::Any => return Ok(None),
            Only::Is(argument, value) => SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value),
            Only::Bits(argument, mask, value) => {
                SeccompCondition::new(argument, Dword, SeccompCmpOp::MaskedEq(mask.into()), value.into())
            }
            Only::Null(argument) => SeccompCondition::new(argument, Qword, SeccompCmpOp::Eq, 0),
            Only::Ourselves(argument) => {
                SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, std::process::id().into())
            }
        };
        SeccompRule::new(vec![condition?]).map(Some)
    }
}

const fn any(number: c_long) -> Call {
    Call {
        number,
        only: Only::Any,
    }
}

const fn is(number: c_long, argument: u8, value: c_long) -> Call {
    Call {
        number,
        // Not negative, in all uses here.
        only: Only::Is(argument, value as u64),
    }
}

const fn bits(number: c_long, argument: u8, mask: c_long, value: c_long) -> Call {
    Call {
        number,
        // The kernel looks at no others.
        only: Only::Bits(argument, mask as u32, value as u32),
    }
}

/// The calls of all arguments, and those with a condition.
fn allowed(kind: Kind) -> impl Iterator<Item = Call> {
    let parts: &[&[Call]] = match kind {
        Kind::Main => &[ALL, START_THREADS, MAIN],
        Kind::Device => &[ALL, START_THREADS, START_SANDBOXED, WORKER, DEVICE],
        Kind::Worker => &[ALL, WORKER],
        Kind::Upkeep => &[ALL, &[PUNCH_HOLE]],
        Kind::ControlSocket => &[ALL, START_THREADS, START_SANDBOXED, CONTROL_CLIENT, CONTROL_SOCKET],
        Kind::ControlClient => &[ALL, CONTROL_CLIENT],
    };
    parts.iter().flat_map(|part| part.iter().copied())
}

/// The calls that fail.
fn absent(kind: Kind) -> impl Iterator<Item = Call> {
    let of_backtraces: &[Call] = match kind {
        // It reads names of processes; landlock keeps it from other files.
        Kind::Device => &[],
        _ => BACKTRACE,
    };
    [CLONE3].into_iter().chain(of_backtraces.iter().copied())
}

/// What every thread needs to run, allocate, wait, log, panic and end.
const ALL: &[Call] = &[
    any(libc::SYS_brk),
    any(libc::SYS_munmap),
    any(libc::SYS_mremap),
    any(libc::SYS_madvise),
    bits(libc::SYS_mmap, 2, libc::PROT_EXEC as c_long, 0),
    bits(libc::SYS_mprotect, 2, libc::PROT_EXEC as c_long, 0),
    any(libc::SYS_futex),
    any(libc::SYS_sched_yield),
    any(libc::SYS_nanosleep),
    any(libc::SYS_clock_nanosleep),
    any(libc::SYS_restart_syscall),
    // The time comes without a call, where the host's clock source lets it.
    any(libc::SYS_clock_gettime),
    any(libc::SYS_getrandom),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    any(libc::SYS_sched_getaffinity),
    any(libc::SYS_getcpu),
    // The beginning of a thread and its end.
    any(libc::SYS_set_robust_list),
    any(libc::SYS_rseq),
    any(libc::SYS_sigaltstack),
    any(libc::SYS_exit),
    any(libc::SYS_exit_group),
    is(libc::SYS_prctl, 0, libc::PR_SET_NAME as c_long),
    // glibc gives its heaps names where it is told to.
    is(libc::SYS_prctl, 0, libc::PR_SET_VMA as c_long),
    // Signals come to any thread; their handlers write into a socket pair. And abort sends one.
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_rt_sigreturn),
    Call {
        number: libc::SYS_sendto,
        only: Only::Null(4),
    },
    Call {
        number: libc::SYS_tgkill,
        only: Only::Ourselves(0),
    },
    // Descriptors at hand.
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_writev),
    any(libc::SYS_close),
    // Debug builds of the standard library look before they close.
    is(libc::SYS_fcntl, 1, libc::F_GETFD as c_long),
    any(libc::SYS_ppoll),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_poll),
];

const CLONE3: Call = any(libc::SYS_clone3);

/// What a thread is and nothing else: no process, no namespace.
const THREAD_FLAGS: c_long = (libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as c_long;
const NAMESPACE_FLAGS: c_long = libc::CLONE_NEWNS as c_long
    | libc::CLONE_NEWUTS as c_long
    | libc::CLONE_NEWIPC as c_long
    | libc::CLONE_NEWUSER as c_long
    | libc::CLONE_NEWPID as c_long
    | libc::CLONE_NEWNET as c_long
    | libc::CLONE_NEWCGROUP as c_long;

const START_THREADS: &[Call] = &[bits(
    libc::SYS_clone,
    0,
    THREAD_FLAGS | NAMESPACE_FLAGS | libc::CLONE_VFORK as c_long,
    THREAD_FLAGS,
)];

/// For a thread that starts others, which then install filters of their own.
const START_SANDBOXED: &[Call] = &[
    is(libc::SYS_prctl, 0, libc::PR_SET_NO_NEW_PRIVS as c_long),
    is(libc::SYS_seccomp, 0, libc::SECCOMP_SET_MODE_FILTER as c_long),
];

/// Waits for signals; at the end removes sockets and tells systemd.
const MAIN: &[Call] = &[
    any(libc::SYS_recvfrom),
    is(libc::SYS_socket, 0, libc::AF_UNIX as c_long),
    any(libc::SYS_connect),
    any(libc::SYS_statx),
    any(libc::SYS_newfstatat),
    any(libc::SYS_unlinkat),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_unlink),
];

/// Waits for kicks, gives memory back.
const WORKER: &[Call] = &[
    any(libc::SYS_epoll_pwait),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_epoll_wait),
    PUNCH_HOLE,
];

const PUNCH_HOLE: Call = is(
    libc::SYS_fallocate,
    1,
    (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as c_long,
);

/// Takes a frontend's connection, its messages and descriptors, and its memory.
const DEVICE: &[Call] = &[
    any(libc::SYS_accept4),
    any(libc::SYS_recvfrom),
    any(libc::SYS_recvmsg),
    any(libc::SYS_sendmsg),
    any(libc::SYS_getsockopt),
    any(libc::SYS_getsockname),
    any(libc::SYS_getpeername),
    is(libc::SYS_ioctl, 1, libc::FIONREAD as c_long),
    is(libc::SYS_ioctl, 1, libc::FIONBIO as c_long),
    is(libc::SYS_fcntl, 1, libc::F_DUPFD_CLOEXEC as c_long),
    is(libc::SYS_fcntl, 1, libc::F_GETFL as c_long),
    is(libc::SYS_fcntl, 1, libc::F_SETFL as c_long),
    // A worker's first step, before its own filters: its CPU.
    is(libc::SYS_sched_setaffinity, 0, 0),
    // What memory is sealed against and lies on; the in-flight region.
    is(libc::SYS_fcntl, 1, libc::F_GET_SEALS as c_long),
    is(libc::SYS_fcntl, 1, libc::F_ADD_SEALS as c_long),
    any(libc::SYS_fstatfs),
    any(libc::SYS_memfd_create),
    any(libc::SYS_ftruncate),
    any(libc::SYS_epoll_create1),
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_eventfd2),
    any(libc::SYS_fstat),
    any(libc::SYS_newfstatat),
    any(libc::SYS_statx),
    any(libc::SYS_lseek),
    // The name of a frontend's process, and what a backtrace looks for: for reading only.
    bits(libc::SYS_openat, 2, !READ_ONLY, 0),
    any(libc::SYS_readlinkat),
    any(libc::SYS_getcwd),
    #[cfg(target_arch = "x86_64")]
    bits(libc::SYS_open, 1, !READ_ONLY, 0),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_readlink),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_stat),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_lstat),
];

/// Flags that change nothing about what a file holds.
const READ_ONLY: c_long = (libc::O_CLOEXEC | libc::O_LARGEFILE | libc::O_NOCTTY) as c_long;

/// Takes clients in.
const CONTROL_SOCKET: &[Call] = &[any(libc::SYS_accept4), any(libc::SYS_setsockopt)];

/// Answers one client.
const CONTROL_CLIENT: &[Call] = &[
    any(libc::SYS_recvfrom),
    PUNCH_HOLE,
    // The head of the slot table, when the size changes.
    any(libc::SYS_pread64),
    any(libc::SYS_pwrite64),
];

/// How a backtrace looks for the names of functions. It goes on without.
const BACKTRACE: &[Call] = &[
    any(libc::SYS_openat),
    any(libc::SYS_readlinkat),
    any(libc::SYS_getcwd),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_open),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_readlink),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_starts_a_thread_may_do_what_it_may() {
        for (starts, started) in [(Kind::Device, Kind::Worker), (Kind::ControlSocket, Kind::ControlClient)] {
            let of_starter: Vec<Call> = allowed(starts).chain(absent(starts)).collect();
            for call in allowed(started) {
                let unconditional = any(call.number);
                assert!(
                    of_starter.contains(&call) || of_starter.contains(&unconditional),
                    "{starts:?} lacks {call:?} of {started:?}"
                );
            }
            for call in absent(started) {
                assert!(
                    of_starter.iter().any(|known| known.number == call.number),
                    "{starts:?} kills for {call:?}, which fails for {started:?}"
                );
            }
        }
    }

    #[test]
    fn no_list_has_what_nobody_may() {
        for kind in Kind::ALL {
            for number in [
                libc::SYS_execve,
                libc::SYS_execveat,
                libc::SYS_ptrace,
                libc::SYS_kill,
                libc::SYS_rt_sigaction,
            ] {
                assert!(
                    allowed(kind).chain(absent(kind)).all(|call| call.number != number),
                    "{kind:?} {number}"
                );
            }
        }
    }
}
