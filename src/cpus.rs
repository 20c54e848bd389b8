//! Where the queues' workers run, when the owner says so.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// CPUs in the order in which queues take them, none twice. Not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

const WANTED: &str = "allowed is a list of CPUs and ranges of them, none twice, such as 2 or 0,4-7";

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let mut cpus = vec![];
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(WANTED.into());
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(format!("CPU {cpu} is there twice; {WANTED}"));
                }
                cpus.push(cpu);
            }
        }
        Ok(CpuList(cpus))
    }
}

/// A CPU's number; sched_setaffinity(2) takes no larger ones here.
fn number(text: &str) -> Result<usize, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let cpu = text.parse().ok().filter(|_| is_number).ok_or(WANTED)?;
    if cpu < CpuSet::MAX_CPU {
        Ok(cpu)
    } else {
        Err(format!(
            "CPU {cpu}: the last that can be named is {}",
            CpuSet::MAX_CPU - 1
        ))
    }
}

impl CpuList {
    /// Fails if the daemon may not use one of them: it is not there, or not in the daemon's cpuset.
    pub fn check(&self) -> Result<(), String> {
        let allowed = sched_getaffinity(None).map_err(|error| format!("no CPUs can be asked for: {error}"))?;
        match self.0.iter().find(|&&cpu| !allowed.is_set(cpu)) {
            Some(cpu) => Err(format!(
                "CPU {cpu} is not among those that the daemon may use: {}",
                written(&allowed)
            )),
            None => Ok(()),
        }
    }

    fn of(&self, queue: u16) -> usize {
        self.0[usize::from(queue) % self.0.len()]
    }
}

/// As the option takes it.
fn written(set: &CpuSet) -> String {
    let mut parts = vec![];
    let mut cpu = 0;
    while cpu < CpuSet::MAX_CPU {
        let first = cpu;
        while cpu < CpuSet::MAX_CPU && set.is_set(cpu) {
            cpu += 1;
        }
        match cpu - first {
            0 => cpu += 1,
            1 => parts.push(first.to_string()),
            _ => parts.push(format!("{first}-{}", cpu - 1)),
        }
    }
    parts.join(",")
}

/// Pins the threads that ask for it.
#[derive(Clone)]
pub(crate) struct Pins {
    cpus: Option<CpuList>,
    was_told: Arc<AtomicBool>,
}

impl Pins {
    pub(crate) fn new(cpus: Option<CpuList>) -> Pins {
        Pins {
            cpus,
            was_told: Arc::default(),
        }
    }

    /// Keeps the calling thread, that of `queue`, on its CPU. One that went away since the start is told of once, and the
    /// queue is served all the same.
    pub(crate) fn pin(&self, queue: u16) {
        let Some(cpus) = &self.cpus else { return };
        let mut set = CpuSet::new();
        set.set(cpus.of(queue));
        if let Err(error) = sched_setaffinity(None, &set)
            && !self.was_told.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(queue, cpu = cpus.of(queue), %error, "--cpus: a worker cannot be kept there");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_are_read_in_their_order() {
        let read = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(read("3"), Ok(vec![3]));
        assert_eq!(read("4-6,0,1-1"), Ok(vec![4, 5, 6, 0, 1]));
        for wrong in [
            "", ",", "1,", "a", "-1", "1-", "2-1", "+1", " 1", "1.5", "0,0", "1-3,2", "1-2-3",
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains("such as 2 or 0,4-7"), "{wrong:?}: {error}");
        }
        for wrong in ["1024", "99999999999999999999", "0-18446744073709551615"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn queues_take_the_list_in_turn() {
        let list: CpuList = "5,2-3".parse().expect("a list");
        assert_eq!([0, 1, 2, 3, 4].map(|queue| list.of(queue)), [5, 2, 3, 5, 2]);
    }

    #[test]
    fn a_cpu_that_cannot_be_used_is_named_with_those_that_can() {
        let list: CpuList = "1023".parse().expect("a list");
        let error = list.check().unwrap_err();
        assert!(error.starts_with("CPU 1023 is not among those"), "{error}");
        let mut set = CpuSet::new();
        [0, 2, 3, 4, 1023].iter().for_each(|&cpu| set.set(cpu));
        assert_eq!(written(&set), "0,2-4,1023");
    }
}
