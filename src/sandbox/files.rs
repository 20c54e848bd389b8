//! What the daemon may do to files (landlock(7)): remove its sockets, read the names of processes, nothing else.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus,
};

/// The newest version of the interface whose rights are known here. An older kernel is asked for what it has.
const INTERFACE: ABI = ABI::V5;

/// Where processes and their names are found.
const PROCESSES: &str = "/proc";

/// Restricts the calling thread and all that it will start. The sockets are in `directories`.
pub(super) fn restrict(directories: &[PathBuf]) -> Result<RulesetStatus, RulesetError> {
    let sockets = directories
        .iter()
        .filter_map(|directory| rule(directory, AccessFs::RemoveFile.into()));
    let rules: Vec<_> = sockets
        .chain(rule(Path::new(PROCESSES), AccessFs::ReadFile.into()))
        .collect();
    let created = Ruleset::default()
        .handle_access(AccessFs::from_all(INTERFACE))?
        .handle_access(AccessNet::from_all(INTERFACE))?
        .create()?
        .add_rules(rules.into_iter().map(Ok::<_, RulesetError>))?;
    Ok(created.restrict_self()?.ruleset)
}

/// None where there is no such directory, and so nothing to be done in it.
fn rule(directory: &Path, access: BitFlags<AccessFs>) -> Option<PathBeneath<PathFd>> {
    PathFd::new(directory)
        .ok()
        .map(|directory| PathBeneath::new(directory, access))
}
