//! Files are on the disk before a command ends that wrote them, and before the rows that they replace are deleted.

use std::path::{Path, PathBuf};

use orlop_wire::proto::client::etcdserverpb::CompactionRequest;
use tempfile::TempDir;

use crate::{
    support::{Backend, Client, Place, Server, orlop, run},
    torture::preload::Preload,
};

fn text(path: &Path) -> &str {
    path.to_str().expect("the path is text")
}

/// Runs a command in a folder. It must succeed. Returns what it synced, in order, with the sizes.
fn syncs_of(folder: &Path, arguments: &[&str]) -> Vec<(PathBuf, u64)> {
    let preload = Preload::build();
    let output = run(orlop(arguments).current_dir(folder).envs(preload.listing_environment()));
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    preload.syncs()
}

/// The file is synced when it is complete and still has its temporary name, and its folder after the file has its final one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saved_snapshots_and_restored_databases_are_synced_with_their_folders() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    // So that the size of an incomplete file differs.
    Client::connect(server.endpoint()).await.put("a", vec![b'v'; 100_000]).await;
    let home = TempDir::new().expect("a folder");
    let home = home.path().canonicalize().expect("the folder exists");
    let (file, data) = (home.join("saved.db"), home.join("data"));
    let save = ["snapshot", "save", text(&file), "--endpoints", server.endpoint()];
    let restore = ["snapshot", "restore", text(&file), "--data-dir", text(&data)];
    for (arguments, folder, file) in [(&save, &home, &file), (&restore, &data, &data.join("orlop.db"))] {
        let syncs = syncs_of(&home, arguments);
        let [.., (synced_file, bytes), (synced_folder, _)] = &syncs[..] else { panic!("{arguments:?}: {syncs:?}") };
        assert_eq!((synced_file.parent(), synced_folder), (Some(&**folder), folder), "{arguments:?}: {syncs:?}");
        let complete = file.metadata().expect("the file exists").len();
        assert!(synced_file != file && *bytes == complete, "{arguments:?}: {complete} bytes, {syncs:?}");
    }
}

/// A file is found after a power cut only if the names of all folders above it are on the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folders_that_contain_new_ones_are_synced() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let home = home.path().canonicalize().expect("the folder exists");
    let (file, absolute) = (home.join("saved.db"), home.join("r/s"));
    syncs_of(&home, &["snapshot", "save", text(&file), "--endpoints", server.endpoint()]);
    for (data, parents) in
        [("p/q/data", &["", "p", "p/q"][..]), ("p/q/other", &["p/q"]), ("alone", &[""]), (text(&absolute), &["", "r"])]
    {
        let syncs = syncs_of(&home, &["snapshot", "restore", text(&file), "--data-dir", data]);
        let synced = |parent: &&str| syncs.iter().any(|(path, _)| *path == home.join(parent));
        assert!(parents.iter().all(synced), "{data}: {syncs:?}");
    }

    let preload = Preload::build();
    let place = Place { environment: preload.listing_environment(), ..Place::default() };
    let flags = ["--listen-client-urls", "https://127.0.0.1:0", "--auto-tls", "--self-signed-cert-validity", "1"];
    let server = Server::orlop_at(None, &flags, place).await;
    let data = server.data_dir().canonicalize().expect("the folder exists");
    let (syncs, made) = (preload.syncs(), data.join("fixtures/client"));
    for folder in [&data, &data.join("fixtures"), &made] {
        assert!(syncs.iter().any(|(path, _)| path == folder), "{}: {syncs:?}", folder.display());
    }
}

/// A power cut would otherwise leave neither a row nor its copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_archived_rows_are_synced_before_the_rows_are_deleted() {
    let preload = Preload::build();
    let place = Place { environment: preload.listing_environment(), ..Place::default() };
    let server = Server::orlop_at(None, &["--history-retention", "1h"], place).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("a", "v").await;
    let revision = client.put("a", "v").await;
    let before = preload.syncs().len();
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    let syncs = preload.syncs();
    let names = syncs[before..].iter().filter_map(|(path, _)| path.file_name()?.to_str());
    let names: Vec<&str> = names.skip_while(|name| *name != "orlop.db-wal").collect();
    // The compact revision, the copy, the deletion.
    assert!(names.starts_with(&["orlop.db-wal", "orlop.db-archive-wal", "orlop.db-wal"]), "{names:?}");
}
