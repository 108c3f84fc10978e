package main

import (
	"flag"
	"io"
	"log"
	"net/http"
	"os"

	"github.com/google/go-containerregistry/pkg/registry"
)

// registryMain serves an image registry whose layers lie in a folder and whose
// manifests are in memory: what was pushed is gone when it stops.
func registryMain() {
	flags := flag.NewFlagSet("registry", flag.ExitOnError)
	address := flags.String("address", "127.0.0.1:5000", "address to serve on")
	folder := flags.String("folder", "registry", "folder of the layers")
	exitOn("registry", flags.Parse(os.Args[1:]))
	exitOn("registry", os.MkdirAll(*folder, 0o755))
	store := blobStore{folder: *folder}
	library := registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithBlobHandler(store))
	exitOn("registry", http.ListenAndServe(*address,
		&uploads{store: store, next: library, open: map[string]*upload{}}))
}
