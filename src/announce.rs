//! What a start prints: the disk in a few lines with the arguments that attach it, ready to paste, and hints about sizes
//! that are unlikely to be meant. Text only; nothing here looks at the host.

use std::fmt::Write;
use std::path::Path;

use zram_core::Algorithm;

use crate::config::{Config, absolute};
use crate::size::human_long;

/// QEMU's own default ring size, and cloud-hypervisor's.
const FRONTEND_QUEUE_SIZE: u16 = 128;
/// The number of queues below which a virtual machine's vCPUs have to be counted first.
const QUEUES_PLENTY: u16 = 64;
/// How often data shrinks to a third is what people should reckon with; see "numbers" in the README.
const RATIO_CAUTIOUS: u64 = 3;
/// The slot table: one 64-bit word for each page of 4 KiB.
const TABLE_SHARE: u64 = 4096 / 8;

/// The block on stdout. `socket_path` is where frontends connect; an inherited socket may have none.
pub fn block(config: &Config, name: &str, socket_path: Option<&Path>) -> String {
    let mut text = format!("vhost-user-zram {}: disk {name} is ready\n", env!("CARGO_PKG_VERSION"));
    line(&mut text, "size", &bytes(config.size_bytes));
    line(
        &mut text,
        "mem-limit",
        &config.mem_limit_bytes.map_or("none".into(), bytes),
    );
    line(&mut text, "algorithm", &config.algorithm.to_string());
    for (priority, algorithm) in recompress_algorithms(config) {
        line(&mut text, "recompress", &format!("{priority}: {algorithm}"));
    }
    line(
        &mut text,
        "socket",
        &socket_path.map_or("inherited".into(), |path| absolute(path).display().to_string()),
    );
    if let Some(path) = &config.control_path {
        line(&mut text, "control", &absolute(path).display().to_string());
    }
    line(&mut text, "use", &expected_use(config));
    if let Some(path) = socket_path {
        text.push_str(&attach(config, name, &absolute(path)));
    }
    text
}

/// The algorithms of recompression with their priorities.
fn recompress_algorithms(config: &Config) -> impl Iterator<Item = (usize, &Algorithm)> {
    let places = config.recompress_algorithms.iter().enumerate();
    places.filter_map(|(place, algorithm)| Some((place + 1, algorithm.as_ref()?)))
}

fn line(text: &mut String, key: &str, value: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  {key:<10} {value}");
}

fn bytes(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", human_long(bytes))
}

/// What the disk costs the host, in two lines.
fn expected_use(config: &Config) -> String {
    let at_most = config
        .mem_limit_bytes
        .unwrap_or(config.size_bytes)
        .min(config.size_bytes);
    let full = config.size_bytes / RATIO_CAUTIOUS;
    let first = if full <= at_most {
        format!(
            "{} of host memory when full of data that shrinks {RATIO_CAUTIOUS} times;",
            human_long(full)
        )
    } else {
        let data = human_long(at_most.saturating_mul(RATIO_CAUTIOUS));
        format!("full after {data} of data that shrinks {RATIO_CAUTIOUS} times;")
    };
    let table = human_long(config.size_bytes / TABLE_SHARE);
    format!(
        "{first}\n{:13}{} at most, and up to {table} of slot table",
        "",
        human_long(at_most)
    )
}

/// The arguments of QEMU and cloud-hypervisor. Both need the guest's memory shared: that is what people forget.
fn attach(config: &Config, name: &str, path: &Path) -> String {
    let path = path.display().to_string();
    let id = qemu_id(name);
    // QEMU doubles a comma inside a value; cloud-hypervisor takes quotes around one.
    let chardev = format!("socket,id={id},path={},reconnect-ms=500", path.replace(',', ",,"));
    let disk = if path.contains(',') {
        format!("\"{path}\"")
    } else {
        path
    };
    let mut device = format!("vhost-user-blk-pci,chardev={id}");
    let mut disk = format!("vhost_user=on,socket={disk}");
    if config.num_queues < QUEUES_PLENTY {
        let _ = write!(device, ",num-queues={}", config.num_queues);
    }
    if config.queue_size_max < FRONTEND_QUEUE_SIZE {
        let _ = write!(device, ",queue-size={}", config.queue_size_max);
        let _ = write!(disk, ",queue_size={}", config.queue_size_max);
    }
    format!(
        "QEMU, with SIZE as in -m:\n  \
           -object memory-backend-memfd,id=mem,size=SIZE,share=on \\\n  \
           -machine memory-backend=mem \\\n  \
           -chardev {} \\\n  \
           -device {device}\n\
         cloud-hypervisor:\n  \
           --memory size=SIZE,shared=on \\\n  \
           --disk {}\n",
        shell(&chardev),
        shell(&disk)
    )
}

/// Letters, digits and `-._` after a letter are all that QEMU takes as an id.
fn qemu_id(name: &str) -> String {
    let fit: String = name
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-._".contains(c) {
                c
            } else {
                '_'
            }
        })
        .collect();
    if fit.starts_with(|c: char| c.is_ascii_alphabetic()) {
        fit
    } else {
        format!("zram-{fit}")
    }
}

fn shell(text: &str) -> String {
    // Fails on a NUL only, which no path can have.
    shlex::try_quote(text).map_or_else(|_| text.into(), |quoted| quoted.into_owned())
}

/// One line for each choice of sizes that is unlikely to be meant.
pub fn hints(config: &Config) -> Vec<String> {
    let mut hints = Vec::new();
    let size = config.size_bytes;
    if config.size_bytes_asked != size {
        hints.push(format!(
            "--size {} is rounded up to whole pages: {size} bytes",
            config.size_bytes_asked
        ));
    }
    match config.mem_limit_bytes {
        Some(limit) if size < limit => hints.push(format!(
            "hint: --size {} is less than --mem-limit {}: the limit will hardly ever matter. --size is what the guest \
             sees, --mem-limit what it may cost here",
            human_long(size),
            human_long(limit)
        )),
        Some(limit) if size > limit.saturating_mul(4) => hints.push(format!(
            "hint: --size {} is more than 4 times --mem-limit {}: guests get write errors once the limit is reached, \
             unless their data shrinks {:.1} times; 3 to 4 times is usual for memory of programs under lz4",
            human_long(size),
            human_long(limit),
            size as f64 / limit as f64
        )),
        _ => {}
    }
    for (priority, algorithm) in recompress_algorithms(config) {
        let below = (1..priority)
            .rev()
            .find_map(|below| config.recompress_algorithms[below - 1].as_ref());
        let below = below.unwrap_or(&config.algorithm);
        if !algorithm.is_denser_than(below) {
            hints.push(format!(
                "hint: --recompress-algorithm {priority}:{algorithm} is not denser than {below}, which comes before \
                 it: recompression with it will hardly gain anything"
            ));
        }
    }
    hints
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::config::{Invocation, parse};

    fn config(arguments: &[&str]) -> Config {
        let line = ["vhost-user-zram"].iter().chain(arguments).map(OsString::from);
        match parse(line) {
            Invocation::Serve(config) => config,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_arguments_survive_the_shell_and_the_option_parsers() {
        let path = "/run/it's a, disk.sock";
        let config = config(&[
            "--size",
            "1G",
            "--socket-path",
            path,
            "--num-queues",
            "2",
            "--queue-size-max",
            "64",
        ]);
        let text = block(&config, "d", Some(Path::new(path)));
        let joined = text.replace("\\\n", " ");
        let (qemu, cloud) = joined.split_once("cloud-hypervisor:").expect("both");
        let qemu = shlex::split(qemu.split_once("QEMU, with SIZE as in -m:").expect("QEMU").1).expect("shell words");
        let after =
            |words: &[String], flag: &str| words[words.iter().position(|word| word == flag).expect("flag") + 1].clone();
        assert_eq!(
            after(&qemu, "-chardev"),
            "socket,id=d,path=/run/it's a,, disk.sock,reconnect-ms=500"
        );
        assert_eq!(
            after(&qemu, "-device"),
            "vhost-user-blk-pci,chardev=d,num-queues=2,queue-size=64"
        );
        let cloud = shlex::split(cloud).expect("shell words");
        assert_eq!(
            after(&cloud, "--disk"),
            "vhost_user=on,socket=\"/run/it's a, disk.sock\",queue_size=64"
        );
    }

    #[test]
    fn ids_are_what_qemu_takes() {
        for (name, id) in [("d0", "d0"), ("0d", "zram-0d"), ("a b/c", "a_b_c"), ("_x", "zram-_x")] {
            assert_eq!(qemu_id(name), id);
        }
    }

    #[test]
    fn each_odd_choice_of_sizes_gets_its_hint() {
        let told =
            |arguments: &[&str]| hints(&config(&[&["--socket-path", "/run/z.sock"], arguments].concat())).join("\n");
        assert_eq!(told(&["--size", "4G", "--mem-limit", "1G"]), "");
        assert_eq!(told(&["--size", "1G", "--mem-limit", "1G"]), "");
        assert!(told(&["--size", "1G", "--mem-limit", "2G"]).contains("less than --mem-limit"));
        assert!(told(&["--size", "5G", "--mem-limit", "1G"]).contains("shrinks 5.0 times"));
        assert!(told(&["--size", "4097"]).contains("8192 bytes"));
    }
}
