package main

import (
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"sync"

	"crypto/sha256"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// An upload is a layer that arrives in several requests: POST opens it, PATCH
// appends to it, PUT closes it and names its digest.
type upload struct {
	file   *os.File
	digest hash.Hash
	size   int64
}

// append writes what a request carries to the upload's file.
func (u *upload) append(body io.Reader) error {
	written, err := io.Copy(io.MultiWriter(u.file, u.digest), body)
	u.size += written
	return err
}

// uploads writes such layers straight to the store. The library's registry keeps
// them in memory until they are complete, and an image here has six gigabytes.
// Every other request goes to the library.
type uploads struct {
	store blobStore
	next  http.Handler

	mutex sync.Mutex
	open  map[string]*upload
}

var uploadPath = regexp.MustCompile(`^(/v2/.+/blobs/uploads)/([a-z0-9]*)$`)

func (u *uploads) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	match := uploadPath.FindStringSubmatch(request.URL.Path)
	whole := request.Method == http.MethodPost && request.URL.Query().Has("digest")
	if match == nil || whole {
		u.next.ServeHTTP(response, request)
		return
	}
	status, err := u.handle(response.Header(), request, match[1], match[2])
	if err != nil {
		http.Error(response, err.Error(), status)
		return
	}
	response.WriteHeader(status)
}

func (u *uploads) handle(header http.Header, request *http.Request, folder, id string) (int, error) {
	if request.Method == http.MethodPost {
		return u.begin(header, folder)
	}
	u.mutex.Lock()
	current := u.open[id]
	u.mutex.Unlock()
	if current == nil {
		return http.StatusNotFound, fmt.Errorf("no upload %q", id)
	}
	switch request.Method {
	case http.MethodPatch:
		if err := current.append(request.Body); err != nil {
			return http.StatusInternalServerError, err
		}
		header.Set("Location", folder+"/"+id)
		header.Set("Range", fmt.Sprintf("0-%d", current.size-1))
		return http.StatusAccepted, nil
	case http.MethodPut:
		u.forget(id)
		return current.finish(u.store, header, request)
	case http.MethodDelete:
		u.forget(id)
		current.discard()
		return http.StatusNoContent, nil
	}
	return http.StatusMethodNotAllowed, fmt.Errorf("an upload takes no %s", request.Method)
}

func (u *uploads) begin(header http.Header, folder string) (int, error) {
	file, err := os.CreateTemp(u.store.folder, "upload-*")
	if err != nil {
		return http.StatusInternalServerError, err
	}
	id := fmt.Sprintf("%016x", rand.Uint64())
	u.mutex.Lock()
	u.open[id] = &upload{file: file, digest: sha256.New()}
	u.mutex.Unlock()
	header.Set("Location", folder+"/"+id)
	header.Set("Range", "0-0")
	return http.StatusAccepted, nil
}

func (u *uploads) forget(id string) {
	u.mutex.Lock()
	delete(u.open, id)
	u.mutex.Unlock()
}

func (u *upload) discard() {
	u.file.Close()
	os.Remove(u.file.Name())
}

// finish takes the last part, compares the digest and publishes the layer.
func (u *upload) finish(store blobStore, header http.Header, request *http.Request) (int, error) {
	want, err := v1.NewHash(request.URL.Query().Get("digest"))
	if err != nil {
		u.discard()
		return http.StatusBadRequest, err
	}
	if err := u.append(request.Body); err != nil {
		u.discard()
		return http.StatusInternalServerError, err
	}
	if got := hex.EncodeToString(u.digest.Sum(nil)); got != want.Hex {
		u.discard()
		return http.StatusBadRequest, fmt.Errorf("digest is sha256:%s, not %s", got, want)
	}
	if err := store.publish(u.file, want); err != nil {
		return http.StatusInternalServerError, err
	}
	header.Set("Docker-Content-Digest", want.String())
	return http.StatusCreated, nil
}
